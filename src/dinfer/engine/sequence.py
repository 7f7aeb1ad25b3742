"""A request on its way through the engine."""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.canvas import Canvas
from dinfer.request import FinishReason, Request, Stats
from dinfer.step import (
    PAGE,
    CachePolicy,
    CacheState,
    Decoder,
    Iteration,
    StepPlan,
    Window,
    WindowState,
)


@dataclass(frozen=True)
class Strategy:
    """The three choices of a request, built from their specs."""

    iteration: Iteration
    cache: CachePolicy
    decoder: Decoder


@dataclass(frozen=True)
class Place:
    """Where one run of a canvas has its keys and values: position p in `slots[p]`, [L] int64."""

    slots: npt.NDArray[np.int64]
    in_one_run: bool

    @classmethod
    def of(cls, pages: list[int], length: int) -> "Place":
        """Position p lies in slot `pages[p // PAGE] * PAGE + p % PAGE`."""
        table = np.array(pages, dtype=np.int64)[:, None] * PAGE + np.arange(PAGE)
        slots = table.reshape(-1)[:length]
        return cls(slots, bool((np.diff(slots) == 1).all()))


@dataclass(eq=False)
class Sequence:
    """Canvas, strategies with their states, pages, and what has been given out so far.

    Under guidance the canvas runs twice in every step, the second time with its given text masked,
    and has a place for each run.
    """

    request: Request
    canvas: Canvas
    strategy: Strategy
    shift: int = 0
    cache_state: CacheState = field(default_factory=CacheState)
    window: Window | None = None
    window_state: WindowState | None = None
    plan: StepPlan | None = None
    pages: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    settled: int = 0
    held_open: bool = False
    soft: Tensor | None = None
    shadow: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    final: int = 0
    finished: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0

    def __post_init__(self) -> None:
        self.settled = self.canvas.answer
        self.canvas.revisable = not self.strategy.decoder.monotone
        self.logprobs = np.zeros(len(self.canvas))

    @property
    def runs(self) -> int:
        """How often the canvas runs in a step."""
        return self.request.runs

    @property
    def rows(self) -> int:
        """Rows that the planned step runs."""
        assert self.plan is not None
        return len(self.plan.rows) * self.runs

    @property
    def pages_needed(self) -> int:
        """Pages that hold the whole canvas, for each run of it."""
        return -(-len(self.canvas) // PAGE) * self.runs

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
        if temperature is None or self.window_state is None:
            return 1.0
        return float(temperature(self.window_state.steps))

    def to_shadow(self) -> npt.NDArray[np.int64]:
        """Set positions of the window whose tokens the decoder wants judged by a row that does not
        see them.
        """
        if "shadow" not in self.strategy.decoder.needs or self.window is None:
            return np.empty(0, np.int64)
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
        self.places = [Place.of(part, len(self.canvas)) for part in parts]
        self.admitted = time.perf_counter()

    def advance(self) -> bool:
        """Finds the window and plans the next step; False when nothing is left to decide."""
        window = self.window if self.held_open else self.strategy.iteration.window(self.canvas)
        if window is None:
            return False
        if window != self.window:
            self._open(window)
        if self.plan is None:
            canvas = self.canvas
            plan = self.strategy.cache.plan(canvas, window, self.cache_state)
            self.plan = self._for_sources(plan, window) if self.shift else plan
            if canvas.block is None and canvas.horizon < len(canvas):
                self.plan = self.plan.and_last(len(canvas) - 1)
        return True

    def _open(self, window: Window) -> None:
        self.window = window
        self.canvas.horizon = len(self.canvas) if window.horizon is None else window.horizon
        undecided = self.canvas.undecided(window.start, window.stop)
        self.window_state = WindowState(opened=len(undecided))

    def narrow(
        self,
        positions: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        confidence: npt.NDArray[np.float32],
    ) -> None:
        """Lets the iteration end a window that has just opened sooner. No new one opens by that:
        its rows have run.
        """
        window, choose = self.window, getattr(self.strategy.iteration, "narrow", None)
        assert window is not None and choose is not None
        stop = choose(self.canvas, window, positions, tokens, confidence)
        narrowed = replace(window, stop=stop)
        self.canvas.chosen = (window.start, stop)
        if self.cache_state.window == window:
            self.cache_state.window = narrowed
        self._open(narrowed)

    @property
    def narrows(self) -> bool:
        """Whether the iteration wants to see the proposals of this step."""
        state = self.window_state
        return state is not None and state.steps == 0 and hasattr(self.strategy.iteration, "narrow")

    def asked(self, window: Window) -> npt.NDArray[np.int64]:
        """Positions of the window that need a proposal."""
        find = self.canvas.decidable if self.canvas.revisable else self.canvas.undecided
        return find(window.start, window.stop)

    def sources(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows whose logits tell the tokens at these positions (see `Facts.shift`)."""
        return np.maximum(positions - self.shift, 0)

    def _for_sources(self, plan: StepPlan, window: Window) -> StepPlan:
        """The plan with the rows that tell the positions asked for; without what lies behind the
        block of the window's last source, which no source can see.
        """
        sources = self.sources(self.asked(window))
        last = self.canvas.reach(max(window.stop - self.shift, 1))
        rows = plan.rows
        if isinstance(rows, range):
            rows = range(min(rows.start, int(sources[0])), min(rows.stop, last))
        else:
            rows = np.union1d(rows[rows < last], sources)
        return replace(plan, rows=rows, visible=min(plan.visible, last))
