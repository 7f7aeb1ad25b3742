"""Requests as users send them: one at a time, many at once, or arriving at random."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dinfer.engine.llm import LLM
from dinfer.request import Output, SamplingParams, TextEvent

Prompt = Sequence[int]


@dataclass
class Served:
    """What a run gave. seconds: of the whole; latency: of each request from its arrival to its
    end; first: to its first settled text. Outputs are in the order of the prompts.
    """

    seconds: float = 0.0
    outputs: list[Output] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)

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


def one_at_a_time(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> Served:
    """Each request begins when the one before has ended."""
    served = Served()
    began = time.perf_counter()
    for prompt in prompts:
        part = arriving(llm, [prompt], params, [0.0])
        served.outputs += part.outputs
        served.latency += part.latency
        served.first += part.first
    served.seconds = time.perf_counter() - began
    return served


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds at which requests come: a Poisson process of `rate` a second, or all at once."""
    if rate is None:
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def arriving(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, times: Sequence[float]
) -> Served:
    """Requests that come at the given seconds (rising); the engine admits as many as it has places
    for.
    """
    engine = llm.engine
    requests = [llm.prompts.complete(list(prompt), params)[0] for prompt in prompts]
    came = {request.id: at for request, at in zip(requests, times, strict=True)}
    first: dict[str, float] = {}
    ended: dict[str, tuple[float, Output]] = {}
    waiting = list(zip(times, requests, strict=True))[::-1]
    began = time.perf_counter()
    while waiting or engine.busy:
        now = time.perf_counter() - began
        while waiting and waiting[-1][0] <= now:
            engine.add(waiting.pop()[1])
        if not engine.busy:
            time.sleep(min(0.001, waiting[-1][0] - now))
            continue
        for event in engine.step():
            if isinstance(event, TextEvent):
                now = time.perf_counter() - began
                first.setdefault(event.id, now)
                if event.output is not None:
                    ended[event.id] = now, event.output
    return Served(
        time.perf_counter() - began,
        [ended[request.id][1] for request in requests],
        [ended[request.id][0] - came[request.id] for request in requests],
        [first[request.id] - came[request.id] for request in requests],
    )
