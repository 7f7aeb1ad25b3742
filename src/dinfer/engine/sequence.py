"""A request on its way through the engine."""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.canvas import Canvas
from dinfer.engine.logprobs import Logprobs
from dinfer.errors import EngineError
from dinfer.request import FinishReason, Request, Stats
from dinfer.step import (
    PAGE,
    CachePolicy,
    CacheState,
    Decoder,
    Growth,
    Iteration,
    ProposalView,
    StepPlan,
    Window,
    WindowState,
)

_NOWHERE = np.empty(0, np.int64)
NEW_STEPS = 4
"""Steps in which a request that has given out nothing yet counts as new."""


@dataclass(frozen=True)
class Strategy:
    """The three choices of a request, built from their specs."""

    iteration: Iteration
    cache: CachePolicy
    decoder: Decoder


@dataclass(frozen=True)
class BlockTable:
    """Where one run of a canvas has its keys and values: position p in `slots[p]`, [L] int64."""

    slots: npt.NDArray[np.int64]
    in_one_run: bool

    @classmethod
    def of(cls, pages: list[int], length: int) -> "BlockTable":
        """Position p lies in slot `pages[p // PAGE] * PAGE + p % PAGE`."""
        table = np.array(pages, dtype=np.int64)[:, None] * PAGE + np.arange(PAGE)
        slots = table.reshape(-1)[:length]
        return cls(slots, bool((np.diff(slots) == 1).all()))


@dataclass(eq=False)
class SequenceState:
    """Canvas, strategies with their states, pages, and what has been given out so far.

    settled: positions before it never change again; told: those before it were made into text.

    error: why it cannot go on. passed_over: steps in a row in which it was ready and did not run.

    Under guidance the canvas runs twice in every step, the second time with its given text masked,
    and has a place for each run.
    """

    request: Request
    canvas: Canvas
    strategy: Strategy
    shift: int = 0
    cache_state: CacheState = field(default_factory=CacheState)
    window: Window | None = None
    states: list[WindowState] = field(default_factory=list)
    plan: StepPlan | None = None
    pages: list[int] = field(default_factory=list)
    places: list[BlockTable] = field(default_factory=list)
    settled: int = 0
    told: int = 0
    held_open: bool = False
    growth: Growth | None = None
    soft: Tensor | None = None
    shadow: npt.NDArray[np.int64] = field(default_factory=lambda: _NOWHERE)
    final: int = 0
    finished: FinishReason | None = None
    error: Exception | None = None
    passed_over: int = 0
    stats: Stats = field(default_factory=Stats)
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0

    def __post_init__(self) -> None:
        self.settled = self.told = self.canvas.answer
        self.canvas.revisable = not self.strategy.decoder.monotone
        self.chances = Logprobs(self.canvas.ceiling, self.request.params)
        if begin := self._hook("begin"):
            begin(self.canvas)

    @property
    def runs(self) -> int:
        """How often the canvas runs in a step."""
        return self.request.runs

    @property
    def is_new(self) -> bool:
        """Whether it began a few steps ago and nothing of its answer is settled."""
        return self.settled == self.canvas.answer and self.stats.forward_passes < NEW_STEPS

    @property
    def max_steps(self) -> int:
        """Steps from which on nothing is taken back and no window is held open; decoders that come
        to an end by themselves need far fewer.
        """
        return 8 * (self.canvas.ceiling - self.canvas.answer) + 64

    @property
    def rows(self) -> int:
        """Rows that the planned step runs."""
        assert self.plan is not None
        return len(self.plan.rows) * self.runs

    @property
    def needs(self) -> frozenset[str]:
        """What its proposals must hold."""
        asked = frozenset({"top"}) if self.request.params.top_logprobs else frozenset[str]()
        return self.strategy.decoder.needs | asked

    @cached_property
    def plain(self) -> bool:
        """Whether all it ever wants of a row is the likeliest token and its probability."""
        params, strategy = self.request.params, self.strategy
        wishes = (params.temperature, params.guidance, params.min_tokens, params.top_logprobs)
        bends = hasattr(strategy.decoder, "temperature") or hasattr(strategy.iteration, "mix")
        return not (any(wishes) or self.request.forbidden or strategy.decoder.needs or bends) and (
            strategy.decoder.monotone
        )

    @cached_property
    def by_rule(self) -> bool:
        """Whether each of its steps is what the decoder's rule makes of the likeliest tokens."""
        looks_on = self._hook("narrow") is not None or self._hook("grow") is not None
        return (
            self.plain
            and getattr(self.strategy.decoder, "rule", None) is not None
            and not (looks_on or self.shift or self.canvas.revisable)
        )

    @property
    def pages_needed(self) -> int:
        """Pages that hold the whole canvas, however it grows, for each run of it."""
        return -(-self.canvas.ceiling // PAGE) * self.runs

    def inputs(self) -> list[npt.NDArray[np.int64]]:
        """Tokens [L] of each run."""
        canvas = self.canvas
        if self.runs == 1:
            return [canvas.tokens]
        assert canvas.mask_id is not None
        return [canvas.tokens, np.where(canvas.given, canvas.mask_id, canvas.tokens)]

    @property
    def reuses(self) -> bool:
        """Whether its cache policy leaves final rows alone, so that pages with them may be shared.
        (The second run of a guided request is never that of another text; shifted logits need a row
        of them again.)
        """
        return self.runs == 1 and not self.shift and getattr(self.strategy.cache, "reuses", False)

    @property
    def opening(self) -> npt.NDArray[np.int64]:
        """The text before the first mask."""
        masked = self.canvas.masked
        return self.canvas.tokens[: int(masked.argmax()) if masked.any() else 0]

    @property
    def final_text(self) -> npt.NDArray[np.int64]:
        """The text whose rows have run for good."""
        return self.canvas.tokens[: self.final]

    @property
    def mix(self) -> float:
        """Weight of the expected embedding in the inputs of this step's masks."""
        mix = getattr(self.strategy.iteration, "mix", None)
        return 0.0 if mix is None else float(mix(self.stats.forward_passes))

    @property
    def scale(self) -> float:
        """What the decoder wants this step's logits to be divided by."""
        temperature = getattr(self.strategy.decoder, "temperature", None)
        if temperature is None or not self.states:
            return 1.0
        return float(temperature(self.states[0].steps))

    def to_shadow(self) -> npt.NDArray[np.int64]:
        """Set positions of the window whose tokens the decoder wants judged by a row that does not
        see them.
        """
        if self.plain or "shadow" not in self.strategy.decoder.needs or self.window is None:
            return _NOWHERE
        places = self.canvas.decidable(self.window.start, self.window.stop)
        return places[~self.canvas.masked[places]]

    def expect(self, positions: npt.NDArray[np.int64], expected_RD: Tensor) -> None:
        """Keeps the embeddings that a step expected in some positions."""
        if self.soft is None:
            self.soft = expected_RD.new_zeros(len(self.canvas), expected_RD.shape[1])
        self.soft[torch.from_numpy(positions).to(expected_RD.device)] = expected_RD

    def place(self, pages: list[int], known: int = 0) -> None:
        """Gives the sequence its pages, the same number to each run. The first `known` ones hold
        the beginning of its text.
        """
        self.pages = pages
        self.stats.reused = self.final = self.cache_state.final = known * PAGE
        self.canvas.stale[: known * PAGE] = False
        share = len(pages) // self.runs
        parts = [pages[i * share : (i + 1) * share] for i in range(self.runs)]
        self.places = [BlockTable.of(part, self.canvas.ceiling) for part in parts]
        self.admitted = time.perf_counter()

    def advance(self) -> bool:
        """Finds the window and plans the next step; False when nothing is left to decide."""
        window = self.window if self.held_open else self.strategy.iteration.window(self.canvas)
        if window is None:
            return False
        if window != self.window or not self.states:
            self._open(window)
        if self.plan is None:
            canvas = self.canvas
            plan = self._checked(self.strategy.cache.plan(canvas, window, self.cache_state))
            self.plan = self._for_sources(plan, window) if self.shift else plan
            if canvas.block is None and canvas.horizon < len(canvas) and window.last:
                self.plan = self.plan.and_last(len(canvas) - 1)
        return True

    def _checked(self, plan: StepPlan) -> StepPlan:
        """The plan. Raises EngineError where it names positions behind the canvas."""
        rows, length = plan.rows, len(self.canvas)
        if not len(rows) or rows[0] < 0 or rows[-1] >= length or plan.visible > length:
            policy = type(self.strategy.cache).__name__
            raise EngineError(f"The cache policy {policy} planned rows that are not on the canvas.")
        return plan

    def _open(self, window: Window) -> None:
        # A part that was in flight before goes on as it was.
        old = self.window.parts if self.window is not None else ()
        known = {(p.start, p.stop): s for p, s in zip(old, self.states, strict=False)}
        self.window = window
        self.canvas.horizon = len(self.canvas) if window.horizon is None else window.horizon
        self.states = [
            known.get((p.start, p.stop))
            or WindowState(opened=len(self.canvas.undecided(p.start, p.stop)))
            for p in window.split()
        ]

    @property
    def curious(self) -> bool:
        """Whether the iteration wants to see the proposals of this step."""
        return self._narrows or self._grows

    def consider(self, seen: ProposalView) -> None:
        """Shows the iteration the proposals for the positions `asked`."""
        if self._narrows:
            self._narrow(seen)
        if self._grows:
            self.growth = self._hook("grow")(self.canvas, self.window, seen)

    def grow(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Lets the canvas grow as the iteration wished. Gives the new places of the tokens that
        moved, and those that they left masked. The next window is a new one.
        """
        growth, canvas, none = self.growth, self.canvas, np.empty(0, np.int64)
        self.growth = None
        # An answer whose end stands is long enough.
        if growth is None or self.held_open or canvas.limit < canvas.end:
            return none, none
        free = (p for p in growth.places if p == len(canvas) or canvas.masked[p])
        place = next(free, None)
        if place is None:
            return none, none
        if growth.count < 1:
            raise EngineError("The iteration asked the canvas to grow by nothing.")
        count, old = growth.count, np.flatnonzero(~canvas.masked[place:]) + place
        canvas.insert(place, count)
        self.chances.move(place, count)
        self.states, self.cache_state.window = [], None
        return old + count, np.setdiff1d(old, old + count)

    def _narrow(self, seen: ProposalView) -> None:
        """Ends a window that just opened sooner. No new one opens by that: its rows have run."""
        window = self.window
        assert window is not None
        stop = self._hook("narrow")(self.canvas, window, seen)
        narrowed = replace(window, stop=stop)
        self.canvas.chosen = (window.start, stop)
        if self.cache_state.window == window:
            self.cache_state.window = narrowed
        self._open(narrowed)

    def _hook(self, name: str) -> Any:
        """What an iteration may have besides `window`."""
        return getattr(self.strategy.iteration, name, None)

    @property
    def _narrows(self) -> bool:
        return self._hook("narrow") is not None and self.states[0].steps == 0

    @property
    def _grows(self) -> bool:
        """Whether the canvas may grow, and a proposal for all that is undecided can be had of this
        step.
        """
        assert self.plan is not None
        may = self._hook("grow") is not None and len(self.canvas) < self.canvas.ceiling
        return may and self.plan.holds(self.sources(self._behind()))

    @property
    def asked(self) -> npt.NDArray[np.int64]:
        """Positions that need a proposal in the planned step."""
        assert self.window is not None
        own = self._decided(self.window)
        return np.append(own, self._behind()) if self._grows else own

    def _behind(self) -> npt.NDArray[np.int64]:
        """What is undecided behind the window."""
        assert self.window is not None
        return self.canvas.undecided(self.window.stop, len(self.canvas))

    def _decided(self, window: Window) -> npt.NDArray[np.int64]:
        """Positions of the window that the decoder decides."""
        find = self.canvas.decidable if self.canvas.revisable else self.canvas.undecided
        return find(window.start, window.stop)

    def sources(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows whose logits tell the tokens at these positions (see `Facts.shift`)."""
        return np.maximum(positions - self.shift, 0) if self.shift else positions

    def _for_sources(self, plan: StepPlan, window: Window) -> StepPlan:
        """The plan with the rows that tell the positions asked for; without what lies behind the
        block of the window's last source, which no source can see.
        """
        sources = self.sources(self._decided(window))
        last = self.canvas.reach(max(window.stop - self.shift, 1))
        rows = plan.rows
        if isinstance(rows, range):
            rows = range(min(rows.start, int(sources[0])), min(rows.stop, last))
        else:
            rows = np.union1d(rows[rows < last], sources)
        # What is left out here did not run, whatever the policy noted when it planned.
        self.cache_state.reach = min(self.cache_state.reach, last)
        return replace(plan, rows=rows, visible=min(plan.visible, last))
