"""What a caller asks for and what comes back."""

from dataclasses import dataclass, field
from typing import Literal

from dinfer.errors import RequestError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to fill the canvas of one request.

    max_tokens: most tokens of the answer, any number. temperature: 0 takes the likeliest token.
    top_p, top_k: sample from the likeliest tokens of that probability mass or that many (0 = all).
    seed: same seed, same tokens, whatever the batch. stop: strings that end the answer and are
    left out of it. n: answers per prompt. logprobs: also give the log probability of each token
    when it was set. ignore_eos: fill the canvas to its end. decoder, cache, iteration: spec
    strings; None = what the model recommends.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    ignore_eos: bool = False
    decoder: str | None = None
    cache: str | None = None
    iteration: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str | list):
            object.__setattr__(
                self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
            )
        _whole("max_tokens", self.max_tokens, 1)
        _whole("top_k", self.top_k, 0)
        _whole("n", self.n, 1)
        _whole("seed", self.seed, 0)
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError(
                f"temperature is {self.temperature}; it must be 0 or more and finite."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; it must hold non-empty strings.")


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of {least} or more.")


@dataclass(frozen=True)
class Request:
    """One canvas to fill: token ids, with None where a token is to be found.

    answer: the first position of the answer (0 for infilling without a prompt). stops: whether an
    end-of-text token ends the answer (not where fixed text follows the blanks). seed: the
    request's own, already told apart for n > 1. forbidden: ids that may not be chosen.
    """

    id: str
    canvas: tuple[int | None, ...]
    answer: int
    params: SamplingParams
    stops: bool = True
    seed: int = 0
    forbidden: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Usage:
    """Tokens counted the way the OpenAI protocol does."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and answer together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass
class Stats:
    """What a request cost. forward_passes: steps it took part in. rows_run: rows of all of them.

    tokens_per_forward counts the answer's tokens, end-of-text included. seconds: from its
    admission to its end; queued_seconds: before that.
    """

    forward_passes: int = 0
    rows_run: int = 0
    tokens: int = 0
    seconds: float = 0.0
    queued_seconds: float = 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens divided by forward passes."""
        return self.tokens / max(1, self.forward_passes)


@dataclass(frozen=True)
class Output:
    """A finished answer. token_ids stop before the end-of-text token or stop string; logprobs
    belong to them.
    """

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stats: Stats
    logprobs: list[float] | None = None
    holes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CanvasEvent:
    """Provisional: what one step committed. positions (counted from the answer's start), their
    tokens and confidence.
    """

    id: str
    step: int
    positions: list[int]
    token_ids: list[int]
    confidence: list[float]


@dataclass(frozen=True)
class TextEvent:
    """Final: text that became settled since the last one; the last event of a request carries its
    Output.
    """

    id: str
    text: str
    output: Output | None = None
