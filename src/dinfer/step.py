"""The nouns of one denoising step. One word per idea:

canvas    token ids of a sequence: prompt, then blanks (then perhaps fixed text); a position never
moves position  index into the canvas
masked    a position that still has to be decided; the opposite is *set*
window    the positions being denoised now; it stays open until none of them is masked
block     unit of a block-causal model's attention grid, counted from position 0
step      one forward and the commit that follows it
rows      the positions a step runs; their keys and values are stored, and nothing else is
visible   what a row may attend to: stored positions before a limit
commit    to set masked positions (or to take one back)
settled   set, and never to change again
page      unit of K/V memory: PAGE positions of one sequence
facts     what the engine must know of a model besides its weights

Shape suffixes: B sequences, W window, T rows of the ragged batch, R rows a token is proposed for,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dinfer.canvas import Canvas

PAGE = 32
"""Positions in a page."""


@dataclass(frozen=True)
class Facts:
    """Facts of a checkpoint, read from its own files.

    block_length: length of the block-causal blocks, counted from position 0; None = full attention.
    eos_ids: every id that ends an answer. context: positions the model was made for.
    iteration, cache, decoder: recommended strategies as spec strings. chat_only: the model knows
    nothing but conversations, so a plain text prompt is put through its chat template. shift: the
    logits of row p - shift tell the token at position p (row 0 where there is no such row).
    """

    mask_id: int
    eos_ids: frozenset[int]
    block_length: int | None
    context: int
    iteration: str
    cache: str
    decoder: str
    chat_only: bool = False
    shift: int = 0


@dataclass(frozen=True)
class Window:
    """Positions `start <= p < stop` to denoise next."""

    start: int
    stop: int


@dataclass(frozen=True)
class StepPlan:
    """Which positions to run; they attend to stored positions before `visible` (a block-causal
    model looks less far).

    `repeat`: for how many more steps the same plan would be given while the window stays open (a
    runner may then take them without asking); 0 = until it closes.
    """

    rows: range
    visible: int
    repeat: int = 1


@dataclass
class CacheState:
    """What a cache policy remembers of one sequence.

    window: the one planned for last. age: steps since the whole canvas ran. plans: steps so far.
    final: leading positions whose stored keys and values will never change.
    """

    window: Window | None = None
    age: int = 0
    plans: int = 0
    final: int = 0

    def due(self, window: Window, refresh: int) -> bool:
        """Whether the whole canvas must run: a window opens, or `refresh` steps (0 = never)
        passed. Counts the step.
        """
        opens = window != self.window
        self.age = 0 if opens or (refresh and self.age >= refresh) else self.age
        self.window = window
        self.age += 1
        self.plans += 1
        return self.age == 1


@dataclass
class WindowState:
    """What a decoder may remember of one sequence's open window.

    opened: masked positions when the window opened. steps: commits made in it so far. memory: the
    decoder's own.
    """

    opened: int
    steps: int = 0
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """A token for every masked position of a batch of windows, with what the decoder asked for.

    tokens [B, W] int64; confidence [B, W] float32, probability of the token under the raw logits;
    entropy (nats), margin (best minus second probability), noise (uniform, keyed by seed, position
    and step) [B, W] float32; logits [B, W, V] float32. Outside the masked positions the values
    mean nothing.
    """

    tokens: Tensor
    confidence: Tensor
    entropy: Tensor | None = None
    margin: Tensor | None = None
    noise: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class Commit:
    """Where to write (`mask` [B, W] bool) and what (`tokens` [B, W]); writing the mask id takes a
    token back.
    """

    mask: Tensor
    tokens: Tensor


class Iteration(Protocol):
    """Chooses the window to denoise next."""

    def window(self, canvas: Canvas) -> Window | None:
        """A function of the canvas alone; None = nothing is left to decide."""
        ...


class CachePolicy(Protocol):
    """Chooses the rows to run. `exact`: gives the tokens of the uncached run."""

    exact: ClassVar[bool]

    def allow(self, facts: Facts) -> None:
        """Raises RequestError where the model does not allow this policy."""
        ...

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """Rows must hold every undecided position of the window; only rows that ran before may be
        left out.
        """
        ...


class Decoder(Protocol):
    """Chooses what to commit. `needs`: fields of Proposal it reads besides tokens and confidence.

    `monotone`: never touches a set position, so whatever is set is settled.
    """

    needs: ClassVar[frozenset[str]]
    monotone: ClassVar[bool]

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Must commit at least one masked position ([B, W] bool) of every window that has one."""
        ...


def ranks(score_BW: Tensor, eligible_BW: Tensor) -> Tensor:
    """Rank of each eligible position by falling score, 0 first; ties to the left; W or more
    elsewhere.
    """
    order = torch.where(eligible_BW, score_BW, -torch.inf).argsort(
        dim=1, descending=True, stable=True
    )
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place)
    return torch.where(eligible_BW, rank, order.shape[1])
