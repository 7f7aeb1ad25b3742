"""Suffix pruning (Streaming-dLLM, arXiv 2601.17917): of the masks behind the window only the
nearest and the very last are looked at.
"""

from dataclasses import dataclass
from functools import cached_property

from dinfer.canvas import Canvas
from dinfer.iteration.blockwise import Blockwise
from dinfer.options import Count, Positive
from dinfer.step import Window


@dataclass(frozen=True)
class Pruned:
    """Blocks as of `blockwise`, with the `ahead` next ones in sight, and of the rest the `last`
    position alone.

    Block-causal models never look ahead; for them it is `blockwise`.
    """

    length: Positive = 32
    ahead: Count = 2
    aligned: bool = False
    last: bool = True

    @cached_property
    def _blocks(self) -> Blockwise:
        return Blockwise(self.length, self.aligned)

    def window(self, canvas: Canvas) -> Window | None:
        """The leftmost block with an undecided position, and how far it looks."""
        window = self._blocks.window(canvas)
        if window is None:
            return None
        # Fixed text behind the blanks is always looked at: it lies before the horizon or there is
        # none.
        horizon = window.stop + self.ahead * self.length
        horizon = len(canvas) if canvas.given_from(horizon) else min(horizon, len(canvas))
        return Window(window.start, window.stop, horizon, self.last)
