"""Fast-dLLM's dual cache (arXiv 2505.22618): all but the window is stored once per window."""

from dataclasses import dataclass
from typing import ClassVar

from dinfer.canvas import Canvas
from dinfer.options import Count
from dinfer.step import CacheState, ModelInfo, StepPlan, Window


@dataclass(frozen=True)
class Dual:
    """All rows when a window opens and every `refresh` steps (0 = never), else only the window."""

    refresh: Count = 0
    exact: ClassVar[bool] = False

    def allow(self, facts: ModelInfo) -> None:
        """Any model."""

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """All rows, or the window's."""
        reach = canvas.reach(window.stop)
        if state.due(window, self.refresh):
            return StepPlan(range(reach), reach)
        return StepPlan(range(window.start, window.stop), reach)
