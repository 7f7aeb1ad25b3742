"""The nouns of one denoising step. One word per idea:

canvas    token ids of a sequence: prompt, then blanks (then perhaps fixed text)
position  index into the canvas; a token keeps it, unless the canvas grows in front of it
masked    a position that still has to be decided; the opposite is *set*
window    the positions being denoised now; it stays open until none of them is masked
block     unit of a block-causal model's attention grid, counted from position 0
step      one forward and the commit that follows it
open      of a canvas in a causal model: the blocks from the first masked position to the window's
          end, whose rows see one another
rows      the positions a step runs; their keys and values are stored, and nothing else is
visible   what a row may attend to: stored positions before a limit
commit    to set masked positions (or to take one back)
settled   set, and never to change again
page      unit of K/V memory: PAGE positions of one sequence
facts     what the engine must know of a model besides its weights

Shape suffixes: B sequences, W window, T rows of the ragged batch, R rows a token is proposed for,
V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.canvas import Canvas

PAGE = 32
"""Positions in a page."""

NUM_TOP = 8
"""Likeliest tokens that a proposal carries for a decoder that needs `top`."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts of a checkpoint, read from its own files.

    block_length: length of the block-causal blocks, counted from position 0; None = full attention.
    mask_id: None where the model has no mask token, and denoises random tokens instead. causal:
    rows of set text see only what lies before them, and blocks are counted from the answer's start.
    eos_ids: every id that ends an answer. context: positions the model was made for.
    iteration, cache, decoder: recommended strategies as spec strings. chat_only: the model knows
    nothing but conversations, so a plain text prompt is put through its chat template. shift: the
    logits of row p - shift tell the token at position p (row 0 where there is no such row).
    """

    mask_id: int | None
    eos_ids: frozenset[int]
    block_length: int | None
    context: int
    iteration: str
    cache: str
    decoder: str
    chat_only: bool = False
    shift: int = 0
    causal: bool = False


@dataclass(frozen=True)
class Part:
    """Positions `start <= p < stop` of a window.

    sure: None, or of what the decoder chooses here only tokens of a confidence above this are set,
    perhaps none, and nothing is taken back.
    """

    start: int
    stop: int
    sure: float | None = None


@dataclass(frozen=True)
class Window:
    """Positions `start <= p < stop` to denoise next.

    horizon: under full attention, the first position that is left out while this window is open;
    None = none is. last: the canvas's last position, which tells the model where the text ends,
    stays in sight beyond the horizon.
    parts: spans that the decoder decides each by itself, in rising order; empty = one, the whole.
    """

    start: int
    stop: int
    horizon: int | None = None
    last: bool = True
    parts: tuple[Part, ...] = ()

    def split(self) -> tuple[Part, ...]:
        """The parts."""
        return self.parts or (Part(self.start, self.stop),)


@dataclass(frozen=True)
class StepPlan:
    """Which positions to run, a range or a rising array; they attend to stored positions before
    `visible` (a block-causal model looks less far) and to those in `also`.

    `repeat`: for how many more steps the same plan would be given while the window stays open (a
    runner may then take them without asking); 0 = until it closes.
    """

    rows: range | npt.NDArray[np.int64]
    visible: int
    repeat: int = 1
    also: tuple[int, ...] = ()

    @property
    def index(self) -> slice | npt.NDArray[np.int64]:
        """The rows as an index into arrays over the canvas."""
        rows = self.rows
        return slice(rows.start, rows.stop) if isinstance(rows, range) else rows

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The rows as an array."""
        rows = self.rows
        return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows

    def find(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Which row each position is; all must be among them."""
        if isinstance(self.rows, range):
            return positions - self.rows.start
        return self.rows.searchsorted(positions)

    def holds(self, positions: npt.NDArray[np.int64]) -> bool:
        """Whether all of the positions are among the rows."""
        if isinstance(self.rows, range):
            return all(p in self.rows for p in positions[[0, -1]]) if len(positions) else True
        return bool(np.isin(positions, self.rows).all())

    def and_last(self, last: int) -> "StepPlan":
        """The same with the canvas's last position, which lies behind all others."""
        rows = np.append(np.asarray(self.rows, dtype=np.int64), last)
        return StepPlan(rows, self.visible, self.repeat, (*self.also, last))


@dataclass
class CacheState:
    """What a cache policy remembers of one sequence.

    window: the one planned for last. age: steps since the whole canvas ran. plans: steps so far.
    final: leading positions whose stored keys and values will never change. reach: how far the
    rows of the last plan could see.
    """

    window: Window | None = None
    age: int = 0
    plans: int = 0
    final: int = 0
    reach: int = 0

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
    """What a decoder may remember of one part of a sequence's open window.

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
    and step) [B, W] float32; logits [B, W, V] float32. The same measures after temperature, top-k
    and top-p: filtered_confidence, filtered_entropy, filtered_margin. top_tokens [B, W, TOP] int64
    (likeliest first, of those that may be chosen) and top_probs, their raw probabilities.

    A decoder that is not monotone also gets proposals for the set positions of the window that are
    no given text: editable [B, W] bool says which; held [B, W] int64 are the tokens there and kept
    [B, W] float32 their probabilities under the raw logits: those of the position's own row, which
    sees its token, or under `shadow` those of a row that sees all but this token.

    random [B, W] int64: any token of the vocabulary with the same probability.

    Outside the masked and editable positions the values mean nothing.
    """

    tokens: Tensor
    confidence: Tensor
    entropy: Tensor | None = None
    margin: Tensor | None = None
    noise: Tensor | None = None
    logits: Tensor | None = None
    filtered_confidence: Tensor | None = None
    filtered_entropy: Tensor | None = None
    filtered_margin: Tensor | None = None
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None
    editable: Tensor | None = None
    held: Tensor | None = None
    kept: Tensor | None = None
    random: Tensor | None = None


@dataclass(frozen=True)
class Commit:
    """Where to write (`mask` [B, W] bool) and what (`tokens` [B, W]).

    Only of a decoder that is not monotone: `mask` may hold editable positions, `back` [B, W] bool
    says which of them are taken back (masked again), and `open` [B] bool which windows stay open
    for another step even if nothing in them is masked.

    draft [B, W]: tokens that the positions which stay masked show the model in the next step, in a
    model without a mask token. confidence [B, W]: of `tokens`, where they are not the proposal's.
    """

    mask: Tensor
    tokens: Tensor
    back: Tensor | None = None
    open: Tensor | None = None
    draft: Tensor | None = None
    confidence: Tensor | None = None


@dataclass(frozen=True)
class ProposalView:
    """What a step proposes, as an iteration sees it: positions (rising) and tokens, int64, and
    confidence, float32; [R] each.
    """

    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Growth:
    """`count` more masks before the first of `places` that is still masked when the step is done,
    or at the canvas's end if that is among them. wait: the step sets nothing.
    """

    places: tuple[int, ...]
    count: int
    wait: bool = False


class Iteration(Protocol):
    """Chooses the window to denoise next.

    May also have `narrow(canvas, window, seen) -> int`: asked in a window's first step, with what
    is proposed for its undecided positions, for where the window shall end; the canvas then keeps
    it as `chosen`.

    May have `begin(canvas)`, asked before a canvas first runs, which may cut it, and `grow(canvas,
    window, seen) -> Growth | None`, asked in every step that runs all undecided positions from the
    window on, with what is proposed for them; the canvas then grows, up to its ceiling.

    May have `mix(step) -> float`: how much of the embedding that the last step expected is added to
    the input of a mask in the request's step `step`.
    """

    def window(self, canvas: Canvas) -> Window | None:
        """A function of the canvas alone; None = nothing is left to decide."""
        ...


class CachePolicy(Protocol):
    """Chooses the rows to run. `exact`: gives the tokens of the uncached run.

    One that never runs rows before `CacheState.final` again may have `reuses` true: where the pool
    still holds the beginning of a text, `final` then starts behind it.
    """

    exact: ClassVar[bool]

    def allow(self, facts: ModelInfo) -> None:
        """Raises RequestError where the model does not allow this policy."""
        ...

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """Rows must hold every undecided position of the window; only rows that ran before may be
        left out.
        """
        ...


class Decoder(Protocol):
    """Chooses what to commit. `needs`: what it reads of a Proposal besides tokens and confidence
    (entropy, margin, noise, random, logits, top, shadow, or filtered_confidence, filtered_entropy,
    filtered_margin).

    One with `drafts` true is for models without a mask token: it gives a draft in every step, and
    commits a window as a whole after a bounded number of steps.

    May have `temperature(step) -> float`: logits of a window's step `step` are divided by it before
    anything is made of them; the request's temperature comes on top.

    One that is monotone may have `rule`: None, or what alone decides its commits (see `Rule`). The
    engine then asks the rule, on the host: for a few numbers that takes less time than tensors do,
    on any device.

    `monotone`: never touches a set position, so whatever is set is settled. One that is not must
    come to an end by itself: over a window's steps it takes back fewer tokens than it sets, and
    holds the window open for a bounded number of steps.
    """

    @property
    def needs(self) -> frozenset[str]: ...  # noqa: D102

    monotone: ClassVar[bool]

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Must commit at least one masked position ([B, W] bool) of every window that has one,
        unless it drafts.
        """
        ...


Places = npt.NDArray[np.int64]
Confidence = npt.NDArray[np.float32]
Rule = Callable[[Places, Confidence], Places]
"""Of the masked positions of one window, rising, and their confidence: which of them to commit, as
indices into both.
"""


def by_rule(rule: Rule, proposal: Proposal, masked: Tensor) -> Commit:
    """What a rule commits, in tensors."""
    mask, confidence = torch.zeros_like(masked), proposal.confidence.cpu().numpy()
    for row, places in enumerate(each.nonzero()[0] for each in masked.cpu().numpy()):
        if len(places):
            mask[row, places[rule(places, confidence[row, places])]] = True
    return Commit(mask, proposal.tokens)


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


def best(score_BW: Tensor, eligible_BW: Tensor) -> Tensor:
    """The eligible position of the highest score in each row that has one, [B, W] bool; ties to
    the left.
    """
    place = torch.where(eligible_BW, score_BW, -torch.inf).argmax(dim=1, keepdim=True)
    return torch.zeros_like(eligible_BW).scatter_(1, place, True) & eligible_BW


def recall(states: Sequence[WindowState], name: str, blank: Tensor) -> Tensor:
    """What each window remembers under `name`, laid over `blank` [B] or [B, W, ...], which stands
    where it remembers nothing.
    """
    found = blank.clone()
    for row, state in zip(found, states, strict=True):
        kept = state.memory.get(name)
        if kept is not None and kept.dim():
            width = min(len(kept), len(row))
            row[:width] = kept[:width]
        elif kept is not None:
            row.copy_(kept)
    return found


def remember(states: Sequence[WindowState], name: str, value: Tensor) -> None:
    """Keeps row b of `value` [B] or [B, W, ...] with window b, until it closes."""
    for row, state in zip(value, states, strict=True):
        state.memory[name] = row
