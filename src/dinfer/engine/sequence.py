"""A request on its way through the engine."""

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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


@dataclass(eq=False)
class Sequence:
    """Canvas, strategies with their states, pages, and what has been given out so far."""

    request: Request
    canvas: Canvas
    strategy: Strategy
    shift: int = 0
    cache_state: CacheState = field(default_factory=CacheState)
    window: Window | None = None
    window_state: WindowState | None = None
    plan: StepPlan | None = None
    pages: list[int] = field(default_factory=list)
    slots: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    in_one_run: bool = True
    settled: int = 0
    finished: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0

    def __post_init__(self) -> None:
        self.settled = self.canvas.answer
        self.logprobs = np.zeros(len(self.canvas))

    @property
    def pages_needed(self) -> int:
        """Pages that hold the whole canvas."""
        return -(-len(self.canvas) // PAGE)

    def place(self, pages: list[int]) -> None:
        """Gives the sequence its pages: position p lies in slot `pages[p // PAGE] * PAGE + p %
        PAGE`.
        """
        self.pages = pages
        table = np.array(pages, dtype=np.int64)[:, None] * PAGE + np.arange(PAGE)
        self.slots = table.reshape(-1)[: len(self.canvas)]
        self.in_one_run = bool((np.diff(self.slots) == 1).all())
        self.admitted = time.perf_counter()

    def advance(self) -> bool:
        """Finds the window and plans the next step; False when nothing is left to decide."""
        window = self.strategy.iteration.window(self.canvas)
        if window is None:
            return False
        if window != self.window:
            self.window = window
            self.window_state = WindowState(
                opened=len(self.canvas.undecided(window.start, window.stop))
            )
        if self.plan is None:
            plan = self.strategy.cache.plan(self.canvas, window, self.cache_state)
            self.plan = self._for_sources(plan, window) if self.shift else plan
        return True

    def sources(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows whose logits tell the tokens at these positions (see `Facts.shift`)."""
        return np.maximum(positions - self.shift, 0)

    def _for_sources(self, plan: StepPlan, window: Window) -> StepPlan:
        """The plan with the row before the first undecided position; without what lies behind the
        block of the window's last source, which no source can see.
        """
        undecided = self.canvas.undecided(window.start, window.stop)
        first = int(self.sources(undecided[:1])[0])
        last = self.canvas.reach(max(window.stop - self.shift, 1))
        rows = range(min(plan.rows.start, first), min(plan.rows.stop, last))
        return StepPlan(rows, min(plan.visible, last), plan.repeat)
