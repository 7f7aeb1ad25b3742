"""AdaBlock (arXiv 2509.26432): a block ends where the model predicts the end of a step of thought,
such as a line.
"""

from dataclasses import dataclass

import numpy as np

from dinfer.canvas import Canvas
from dinfer.options import Count, Positive, Probability
from dinfer.step import ProposalView, Window


@dataclass(frozen=True)
class AdaBlock:
    """In its first step a block looks at the next `part` of the answer's length. It ends with the
    surest predicted `delimiter` (token id; 198 is LLaDA's newline) if that one's confidence
    reaches `threshold`, else after `length` positions.
    """

    length: Positive = 32
    delimiter: Count = 198
    threshold: Probability = 0.3
    part: Probability = 0.25

    def window(self, canvas: Canvas) -> Window | None:
        """The block that is open, or all that the next one looks at."""
        first = canvas.first_masked()
        if first is None:
            return None
        start, stop = canvas.chosen
        if start <= first < stop:
            return Window(start, stop)
        look = max(self.length, self._look(canvas))
        return Window(first, min(first + look, len(canvas)))

    def _look(self, canvas: Canvas) -> int:
        return int(self.part * (len(canvas) - canvas.answer))

    def narrow(self, canvas: Canvas, window: Window, seen: ProposalView) -> int:
        """Where the block ends."""
        near = seen.positions < window.start + self._look(canvas)
        ends = near & (seen.tokens == self.delimiter) & (seen.confidence >= self.threshold)
        if not ends.any():
            return min(window.start + self.length, window.stop)
        return int(seen.positions[np.where(ends, seen.confidence, -1.0).argmax()]) + 1
