"""Requests as users send them: so many at once, or arriving at random; in this process or over a
server.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from dinfer.bench.machine import Timing
from dinfer.engine.llm import LLM
from dinfer.request import Output, Request, SamplingParams, TextEvent


@dataclass(frozen=True)
class Ask:
    """A request to be sent: what a user says, or token ids as they stand, and how to answer it."""

    prompt: str | Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Load:
    """How requests come: from `at_once` callers, each of whom sends the next one when theirs is
    answered; or with `rate` at random, so many a second (a Poisson process drawn from `seed`).
    quiet: nobody watches the answers grow (in this process).
    """

    at_once: int = 1
    rate: float | None = None
    seed: int = 0
    quiet: bool = False

    def times(self, count: int) -> list[float]:
        """Seconds from the start before which each request does not come."""
        if self.rate is None:
            return [0.0] * count
        rng, now, times = random.Random(self.seed), 0.0, []
        for _ in range(count):
            now += rng.expovariate(self.rate)
            times.append(now)
        return times

    def callers(self, count: int) -> int:
        """Requests that may be under way at a time."""
        return min(count, self.at_once) if self.rate is None else count


@dataclass(frozen=True)
class Answered:
    """One request. Seconds from its arrival: first, to its first settled text (or its end, where
    there is none); latency, to its end.
    """

    output: Output
    first: float
    latency: float


@dataclass(frozen=True)
class Served:
    """What a run gave: seconds of the whole, and the answers in the order they were asked for."""

    seconds: float
    answers: list[Answered]

    @property
    def outputs(self) -> list[Output]:
        """Of all requests."""
        return [answer.output for answer in self.answers]

    @property
    def tokens(self) -> int:
        """Answer tokens up to the first end-of-text."""
        return sum(output.stats.tokens for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole run."""
        return self.tokens / self.seconds

    @property
    def forward_passes(self) -> int:
        """Sum over the requests."""
        return sum(output.stats.forward_passes for output in self.outputs)


Run = Callable[[Sequence[Ask], Load], Served]
"""Sends requests under a load, wherever they go."""
Send = Callable[[Ask], Iterable[TextEvent]]
"""Settled text of one request as it comes; the last event has the output."""


def in_process(llm: LLM, asks: Sequence[Ask], load: Load) -> Served:
    """By the engine of `llm`, which admits as many as it has places for."""
    engine = llm.engine
    requests = [replace(_request(llm, ask), quiet=load.quiet) for ask in asks]
    waiting = deque(zip(load.times(len(asks)), requests, strict=True))
    came: dict[str, float] = {}
    first: dict[str, float] = {}
    ended: dict[str, tuple[float, Output]] = {}
    began = time.perf_counter()
    while waiting or engine.busy:
        now = time.perf_counter() - began
        while waiting and waiting[0][0] <= now and engine.load < load.callers(len(asks)):
            at, request = waiting.popleft()
            came[request.id] = now if load.rate is None else at
            engine.add(request)
        if not engine.busy:
            time.sleep(min(0.001, waiting[0][0] - now))
            continue
        for event in engine.step():
            if isinstance(event, TextEvent):
                now = time.perf_counter() - began
                first.setdefault(event.id, now)
                if event.output is not None:
                    ended[event.id] = now, event.output
    answers = []
    for name, arrived in came.items():
        end, output = ended[name]
        answers.append(Answered(output, first[name] - arrived, end - arrived))
    return Served(time.perf_counter() - began, answers)


def _request(llm: LLM, ask: Ask) -> Request:
    said = ask.prompt
    if isinstance(said, str):
        said = llm.prompts.chat([{"role": "user", "content": said}])
    return llm.prompts.complete(list(said), ask.params)[0]


def over(send: Send, asks: Sequence[Ask], load: Load) -> Served:
    """By whatever `send` reaches, a thread for each caller."""

    def answered(at: float, ask: Ask) -> Answered:
        time.sleep(max(0.0, began + at - time.perf_counter()))
        came, first = time.perf_counter(), None
        for event in send(ask):
            first = first or time.perf_counter() - came
            output = event.output
        assert first is not None and output is not None
        return Answered(output, first, time.perf_counter() - came)

    with ThreadPoolExecutor(load.callers(len(asks))) as callers:
        began = time.perf_counter()
        answers = list(callers.map(answered, load.times(len(asks)), asks))
        return Served(time.perf_counter() - began, answers)


def figures(runs: Sequence[Served]) -> dict[str, Any]:
    """What repeated runs of the same requests came to."""
    answers = [answer for run in runs for answer in run.answers]
    return {
        "tokens_per_second": asdict(Timing.of([run.tokens_per_second for run in runs])),
        "seconds_per_request": asdict(Timing.of([answer.latency for answer in answers])),
        "seconds_to_first_text": asdict(Timing.of([answer.first for answer in answers])),
        "tokens_per_forward": runs[0].tokens / runs[0].forward_passes,
    }
