"""A window that moves with the leftmost masked position (the sliding window of dInfer, arXiv
2510.08666).
"""

from dataclasses import dataclass

from dinfer.canvas import Canvas
from dinfer.errors import RequestError
from dinfer.options import Positive
from dinfer.step import Window


@dataclass(frozen=True)
class Sliding:
    """`length` positions from the leftmost masked one, moved on whenever `stride` positions at its
    left are set.
    """

    length: Positive = 32
    stride: Positive = 8

    def __post_init__(self) -> None:
        if self.stride > self.length:
            raise RequestError(
                f"sliding has length {self.length} and stride {self.stride};"
                " the stride must be at most the length."
            )

    def window(self, canvas: Canvas) -> Window | None:
        """The window over the leftmost undecided position."""
        first = canvas.first_masked()
        if first is None:
            return None
        base = canvas.answer if first >= canvas.answer else 0
        start = base + (first - base) // self.stride * self.stride
        return Window(start, min(start + self.length, len(canvas)))
