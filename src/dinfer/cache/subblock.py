"""Fast-dLLM v2's cache inside a block (arXiv 2509.26328): only the sub-block runs again."""

from dataclasses import dataclass
from typing import ClassVar

from dinfer.cache.block import Block
from dinfer.canvas import Canvas
from dinfer.step import CacheState, ModelInfo, StepPlan, Window


@dataclass(frozen=True)
class Subblock:
    """As `block` when a window opens, and as long as its first position is masked; else the rows
    of the window alone, over what is stored of the rest of their block.
    """

    exact: ClassVar[bool] = False

    def allow(self, facts: ModelInfo) -> None:
        """Only block-causal models, as for `block`."""
        Block().allow(facts)

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """The rows of `block`, or the window's."""
        opens = state.due(window, refresh=0)
        if opens or canvas.masked[window.start]:
            return Block().plan(canvas, window, state)
        return StepPlan(range(window.start, window.stop), canvas.reach(window.stop))
