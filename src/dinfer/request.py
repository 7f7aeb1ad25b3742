"""What a caller asks for and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dinfer.errors import RequestError

FinishReason = Literal["stop", "length", "abort"]

REPEAT = 4
"""Tokens of a run that `Stats.repetition` looks for."""

REPETITIVE = 0.5
"""Repetition from which an answer is worth an alarm."""


@dataclass(frozen=True)
class SamplingParams:
    """How to fill the canvas of one request.

    max_tokens: most tokens of the answer, any number. min_tokens: no end of text among so many
    first ones (1 = no empty answer). temperature: 0 takes the likeliest token.
    top_p, top_k: sample from the likeliest tokens of that probability mass or that many (0 = all).
    seed: same seed, same tokens, whatever the batch. stop: strings that end the answer and are
    left out of it. n: answers per prompt. logprobs: also give the log probability of each token
    when it was set. top_logprobs: and of so many of the likeliest ones there, at most 8.
    ignore_eos: fill the canvas to its end. guidance: scale w of classifier-free guidance; with
    more than 0 every step also runs the canvas with its given text masked, and decodes from logits
    u + (1 + w) (c - u). decoder, cache, iteration: spec strings; None = what the model recommends.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False
    guidance: float = 0.0
    decoder: str | None = None
    cache: str | None = None
    iteration: str | None = None
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.stop is None or isinstance(self.stop, str | list):
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            object.__setattr__(self, "stop", stop)
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _whole("top_logprobs", self.top_logprobs, 0)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _whole("n", self.n, 1)
        _whole("seed", self.seed, 0)
        # Logits are divided in float32, where a larger number is infinite.
        if not _is_number(self.temperature) or not 0.0 <= self.temperature <= 1e38:
            raise RequestError(
                f"temperature is {self.temperature!r}; it must be a number of 0 or more and finite"
                " (at most 1e38)."
            )
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise RequestError(
                f"top_p is {self.top_p!r}; it must be a number above 0 and at most 1."
            )
        if not _is_number(self.guidance) or not 0.0 <= self.guidance <= 1e6:
            raise RequestError(
                f"guidance is {self.guidance!r}; it must be a number from 0 (off) to 1e6."
            )
        if not isinstance(self.stop, tuple) or any(
            not isinstance(text, str) or not text for text in self.stop
        ):
            raise RequestError(f"stop is {self.stop!r}; it must hold non-empty strings.")
        for kind in ("decoder", "cache", "iteration"):
            spec = getattr(self, kind)
            if spec is not None and not isinstance(spec, str):
                raise RequestError(f"{kind} is {spec!r}; it must be a spec string or None.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of {least} or more.")
    if most is not None and value > most:
        raise RequestError(f"{name} is {value}; it must be at most {most}.")


@dataclass(frozen=True)
class Request:
    """One canvas to fill: token ids, with None where a token is to be found.

    answer: the first position of the answer (0 for infilling without a prompt). stops: whether an
    end-of-text token ends the answer (not where fixed text follows the blanks). seed: the
    request's own, already told apart for n > 1. forbidden: ids that may not be chosen. end: where
    the answer ends at the latest; fixed text behind it is seen by the model and not given out
    (None = the canvas's end). quiet: nobody watches the answer grow, so its last event is all that
    is given. cache_salt: rows in the prefix cache are shared only by requests of the same salt.
    """

    id: str
    canvas: tuple[int | None, ...]
    answer: int
    params: SamplingParams
    stops: bool = True
    seed: int = 0
    forbidden: frozenset[int] = frozenset()
    end: int | None = None
    quiet: bool = False
    cache_salt: str = ""

    @property
    def runs(self) -> int:
        """How often the canvas runs in a step: guidance wants it without its given text too."""
        return 2 if self.params.guidance else 1


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
    reused: leading rows that an earlier request had run already.

    tokens_per_forward counts the answer's tokens, end-of-text included. seconds: from its
    admission to its end; queued_seconds: before that. repetition: share of the answer's runs of
    REPEAT tokens that stood in it before; from REPETITIVE on the answer goes round in circles.
    """

    forward_passes: int = 0
    rows_run: int = 0
    reused: int = 0
    tokens: int = 0
    seconds: float = 0.0
    queued_seconds: float = 0.0
    repetition: float = 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Answer tokens divided by forward passes."""
        return self.tokens / max(1, self.forward_passes)


def repetition(tokens: Sequence[int]) -> float:
    """Share of the runs of REPEAT tokens that stood before in the same text; 0 where it is too
    short to tell.
    """
    runs = [tuple(tokens[i : i + REPEAT]) for i in range(len(tokens) - REPEAT + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


@dataclass(frozen=True)
class Output:
    """A finished answer. token_ids stop before the end-of-text token or stop string; logprobs
    belong to them, and so do top_logprobs: pairs of token id and log probability, likeliest first.
    """

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stats: Stats
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    holes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CanvasEvent:
    """Provisional: what one step committed. positions (counted from the answer's start), their
    tokens and confidence; back: positions that were taken back, and are masked again.
    """

    id: str
    step: int
    positions: list[int]
    token_ids: list[int]
    confidence: list[float]
    back: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TextEvent:
    """Final: text that became settled since the last one; the last event of a request carries its
    Output.
    """

    id: str
    text: str
    output: Output | None = None


@dataclass(frozen=True)
class FailureEvent:
    """The last event of a request that failed by itself; other requests go on. error: why."""

    id: str
    error: Exception
