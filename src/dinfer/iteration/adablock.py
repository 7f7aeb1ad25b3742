"""AdaBlock (arXiv 2509.26432): a block ends where the model predicts the end of a step of thought,
such as a line.
"""

from dataclasses import dataclass

import numpy as np

from dinfer.canvas import Canvas
from dinfer.errors import RequestError
from dinfer.step import ProposalView, Window


@dataclass(frozen=True)
class AdaBlock:
    """In its first step a block looks at the next `part` of the answer's length. It ends with the
    surest predicted `delimiter` (token id; 198 is LLaDA's newline) if that one's confidence
    reaches `threshold`, else after `length` positions.
    """

    length: int = 32
    delimiter: int = 198
    threshold: float = 0.3
    part: float = 0.25

    def __post_init__(self) -> None:
        if self.length < 1 or self.delimiter < 0:
            raise RequestError(
                f"adablock has length {self.length} and delimiter {self.delimiter};"
                " length >= 1 and delimiter >= 0 are needed."
            )
        if not (0.0 <= self.threshold <= 1.0 and 0.0 <= self.part <= 1.0):
            raise RequestError(
                f"adablock has threshold {self.threshold} and part {self.part};"
                " both must lie between 0 and 1."
            )

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
