"""dInfer beside Fast-dLLM: same weights, prompts and canvas, on the same machine, in one run."""

import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from dinfer.bench import baseline, fast_dllm
from dinfer.bench.machine import seconds_of
from dinfer.bench.traffic import Ask, Load, Served, in_process
from dinfer.engine.llm import LLM
from dinfer.errors import DinferError, RequestError
from dinfer.loader.load import Loaded
from dinfer.request import SamplingParams

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Mode:
    """A way of Fast-dLLM: cache, and the rule that commits (threshold, factor, or `steps` per
    block).
    """

    cache: baseline.Mode
    threshold: float | None = None
    factor: float | None = None
    steps: int = 32

    def __str__(self) -> str:
        rule = (
            f"threshold {self.threshold}"
            if self.threshold is not None
            else f"factor {self.factor}"
            if self.factor is not None
            else f"{self.steps} steps a block"
        )
        return f"{self.cache} cache, {rule}"


@dataclass(frozen=True)
class Answers:
    """Of one side, one request at a time: ids up to the first end-of-text (that included), passes
    and seconds per prompt.
    """

    ids: list[list[int]]
    passes: list[int]
    seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Of the whole run."""
        return sum(map(len, self.ids)) / sum(self.seconds)


class Rival(Protocol):
    """Fast-dLLM, original or ours."""

    name: str

    def modes(self) -> list[Mode]:
        """The ways that it offers."""
        ...

    def run(self, prompts: Prompts, mode: Mode) -> Answers:
        """Answers the prompts one after the other."""
        ...


def until_end(ids: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    """The ids up to the first end-of-text, which counts."""
    end = next((place for place, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
    return list(ids[: end + 1])


@dataclass(frozen=True)
class Canvas:
    """The canvas of both sides: answer tokens, block length, and for random weights the tokens a
    step that all modes are held to.
    """

    length: int
    block: int = 32
    tokens_per_step: int | None = None

    def modes(self, factor: bool) -> list[Mode]:
        """Every cache with every rule."""
        caches: tuple[baseline.Mode, ...] = ("none", "prefix", "dual")
        if self.tokens_per_step is not None:
            return [Mode(c, steps=self.block // self.tokens_per_step) for c in caches]
        rules = [{"threshold": 0.9}, {}] + ([{"factor": 1.0}] if factor else [])
        return [Mode(c, steps=self.block, **rule) for rule in rules for c in caches]


class Baseline:
    """Our own Fast-dLLM, from the paper."""

    name = "baseline (Fast-dLLM from the paper)"

    def __init__(self, loaded: Loaded, canvas: Canvas) -> None:
        self.loaded, self.canvas = loaded, canvas

    def modes(self) -> list[Mode]:
        """The ways that it offers."""
        return self.canvas.modes(factor=False)

    def run(self, prompts: Prompts, mode: Mode) -> Answers:
        """Answers the prompts one after the other."""
        facts, model = self.loaded.facts, self.loaded.model
        mask_id = facts.mask_id
        if mask_id is None:
            raise RequestError("The baseline fills in masks, and this model has no mask token.")
        settings = baseline.Settings(
            self.canvas.length, self.canvas.block, mode.cache, mode.threshold, mode.steps
        )
        found = Answers([], [], [])
        for prompt in prompts:

            def answer(prompt: Sequence[int] = prompt) -> None:
                ids, passes = baseline.generate(model, prompt, mask_id, settings)
                found.ids.append(until_end(ids, facts.eos_ids))
                found.passes.append(passes)

            found.seconds.append(seconds_of(answer, model.embedding.weight.device))
        return found


class Original:
    """The code of a Fast-dLLM checkout, in an interpreter of its own."""

    name = "Fast-dLLM (original)"

    def __init__(
        self, checkout: Path, python: str, folder: Path, loaded: Loaded, canvas: Canvas
    ) -> None:
        if not (checkout / "llada" / "generate.py").is_file():
            raise DinferError(
                f"--fast-dllm is {str(checkout)!r}, which has no llada/generate.py;"
                " give a checkout of github.com/NVlabs/Fast-dLLM."
            )
        self.loaded, self.canvas = loaded, canvas
        dtype = str(loaded.model.embedding.weight.dtype).removeprefix("torch.")
        script = [python, fast_dllm.__file__, str(checkout), str(folder), dtype]
        try:
            self._process = subprocess.Popen(
                [*script, str(torch.get_num_threads())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise DinferError(
                f"--python is {python!r}, which cannot be run: {error.strerror}."
            ) from error
        self._factor = bool(self._answer()["factor"])

    def __enter__(self) -> "Original":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def modes(self) -> list[Mode]:
        """The ways that it offers."""
        return self.canvas.modes(self._factor)

    def run(self, prompts: Prompts, mode: Mode) -> Answers:
        """Sends one job and waits for its answer."""
        canvas, eos = self.canvas, self.loaded.facts.eos_ids
        job = {
            "mode": mode.cache,
            "prompts": [list(prompt) for prompt in prompts],
            "length": canvas.length,
            "block": canvas.block,
            "steps": mode.steps * (canvas.length // canvas.block),
            "threshold": mode.threshold,
            "factor": mode.factor,
            "mask_id": self.loaded.facts.mask_id,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        ids = [until_end(ids, eos) for ids in found["ids"]]
        return Answers(ids, found["passes"], found["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._process.stderr.read().strip().splitlines()[-1:] or ["it said nothing"]
            self.close()
            raise DinferError(f"The Fast-dLLM process ended: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def best_mode(
    rival: Rival, prompts: Prompts, say: Callable[[str], None]
) -> tuple[Mode, dict[str, float]]:
    """The mode with the least median seconds on a few prompts, and the seconds of all."""
    seconds, modes = {}, rival.modes()
    rival.run(prompts[:1], modes[-1])
    for mode in modes:
        seconds[mode] = statistics.median(rival.run(prompts, mode).seconds)
        say(f"{rival.name}, {mode}: {seconds[mode]:.3f} s a request")
    best = min(seconds, key=lambda mode: seconds[mode])
    return best, {str(mode): value for mode, value in seconds.items()}


@dataclass(frozen=True)
class Duel:
    """One run: ours one at a time and many at once, theirs one at a time (it has no batches of
    different requests). Lists hold one entry per repetition.
    """

    ours: list[Served]
    many: list[Served]
    theirs: list[Answers]
    mode: Mode
    tried: dict[str, float]

    def figures(self) -> dict[str, float]:
        """Medians and their ratios."""
        one = statistics.median(x.latency for served in self.ours for x in served.answers)
        rival = statistics.median(x for answers in self.theirs for x in answers.seconds)
        rate = statistics.median(served.tokens_per_second for served in self.many)
        rival_rate = statistics.median(answers.tokens_per_second for answers in self.theirs)
        first, other = self.ours[0], self.theirs[0]
        return {
            "seconds_per_request": one,
            "rival_seconds_per_request": rival,
            "latency_ratio": rival / one,
            "tokens_per_second": rate,
            "rival_tokens_per_second": rival_rate,
            "throughput_ratio": rate / rival_rate,
            "forward_passes": first.forward_passes / len(first.outputs),
            "rival_forward_passes": statistics.fmean(other.passes),
            "tokens_per_forward": first.tokens / first.forward_passes,
            "rival_tokens_per_forward": sum(map(len, other.ids)) / sum(other.passes),
        }


def duel(
    llm: LLM,
    rival: Rival,
    prompts: Prompts,
    params: SamplingParams,
    repeats: int,
    say: Callable[[str], None] = lambda line: None,
) -> Duel:
    """Both sides in turns, `repeats` times, after the rival's modes were tried on a few prompts."""
    mode, tried = best_mode(rival, prompts[:4], say)
    found = Duel([], [], [], mode, tried)
    asks = [Ask(prompt, params) for prompt in prompts]
    in_process(llm, asks[:2], Load(quiet=True))
    for number in range(repeats):
        found.ours.append(in_process(llm, asks, Load(quiet=True)))
        found.theirs.append(rival.run(prompts, mode))
        found.many.append(in_process(llm, asks, Load(len(asks), quiet=True)))
        say(f"round {number + 1}: {json.dumps(found.figures())}")
    return found
