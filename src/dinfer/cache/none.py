"""No caching: everything that can be seen runs at every step."""

from dataclasses import dataclass
from typing import ClassVar

from dinfer.canvas import Canvas
from dinfer.step import CacheState, ModelInfo, StepPlan, Window


@dataclass(frozen=True)
class Uncached:
    """The reference that exact policies equal."""

    exact: ClassVar[bool] = True

    def allow(self, facts: ModelInfo) -> None:
        """Any model."""

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """All rows."""
        reach = canvas.reach(window.stop)
        return StepPlan(range(reach), reach, repeat=0)
