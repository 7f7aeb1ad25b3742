"""dInfer's vicinity refresh (arXiv 2510.08666): the window and its neighbours run, far rows stay
as stored.
"""

from dataclasses import dataclass
from typing import ClassVar

from dinfer.cache.block import Block
from dinfer.canvas import Canvas
from dinfer.options import Count
from dinfer.step import CacheState, ModelInfo, StepPlan, Window

_FINAL = Block()


@dataclass(frozen=True)
class Vicinity:
    """`left` and `right` neighbours run along with the window.

    The whole canvas (of a block-causal model: all that is not final) runs in the first `warmup`
    steps, when a window opens (with `reopen` false: only when a block-causal model comes to a new
    block) and every `refresh` steps (0 = never). Rows that come into sight, and rows whose token
    was set after they last ran, always run along.
    """

    left: Count = 16
    right: Count = 16
    warmup: Count = 0
    refresh: Count = 0
    reopen: bool = True
    exact: ClassVar[bool] = False
    reuses: ClassVar[bool] = True

    def allow(self, facts: ModelInfo) -> None:
        """Any model."""

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """All rows, or the window with its neighbourhood."""
        reach, ran = canvas.reach(window.stop), state.reach
        if not self.reopen and state.window is not None and (canvas.block is None or reach == ran):
            state.window = window
        state.reach = reach
        if state.due(window, self.refresh) or state.plans <= self.warmup:
            return (
                StepPlan(range(reach), reach)
                if canvas.block is None
                else _FINAL.plan(canvas, window, state)
            )
        start = max(state.final, min(window.start - self.left, canvas.first_changed()))
        stop = min(window.stop + self.right, reach)
        if reach > ran:  # rows that never ran
            start, stop = min(start, ran), reach
        return StepPlan(range(start, stop), reach)
