"""Fast-dLLM's prefix cache (arXiv 2505.22618): what lies before the window is stored once per
window.
"""

from dataclasses import dataclass
from typing import ClassVar

from dinfer.canvas import Canvas
from dinfer.options import Count
from dinfer.step import CacheState, ModelInfo, StepPlan, Window


@dataclass(frozen=True)
class Prefix:
    """All rows when a window opens and every `refresh` steps (0 = never), else the window and all
    after it.
    """

    refresh: Count = 0
    exact: ClassVar[bool] = False

    def allow(self, facts: ModelInfo) -> None:
        """Any model."""

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """All rows, or from the window on."""
        reach = canvas.reach(window.stop)
        return StepPlan(range(0 if state.due(window, self.refresh) else window.start, reach), reach)
