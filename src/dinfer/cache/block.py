"""Exact caching of block-causal models (block diffusion, arXiv 2503.09573) without a forward of
its own per block.
"""

from dataclasses import dataclass
from typing import ClassVar

from dinfer.canvas import Canvas
from dinfer.errors import RequestError
from dinfer.step import CacheState, ModelInfo, StepPlan, Window


@dataclass(frozen=True)
class Block:
    """Finished blocks are stored for good; the one just finished (or the prompt) runs along in the
    next first step.
    """

    exact: ClassVar[bool] = True
    reuses: ClassVar[bool] = True

    def allow(self, facts: ModelInfo) -> None:
        """Only block-causal models: elsewhere a finished block changes with what follows it."""
        if facts.block_length is None:
            raise RequestError(
                "The cache 'block' needs a block-causal model and this model attends in full;"
                " use none, prefix, dual or vicinity."
            )

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """From the first row that is not final to the end of the window's block."""
        reach = canvas.reach(window.stop)
        rows = range(state.final, reach)
        masked = canvas.masked[:reach]
        # Blocks that hold no mask now, and will not change, are stored for good by this very step.
        first = int(masked.argmax()) if masked.any() else reach
        first = min(first, window.start) if canvas.revisable else first
        state.final = max(state.final, canvas.block_start(first))
        return StepPlan(rows, reach)
