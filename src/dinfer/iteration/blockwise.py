"""One block after another (LLaDA, arXiv 2502.09992; block diffusion, arXiv 2503.09573)."""

from dataclasses import dataclass

from dinfer.canvas import Canvas
from dinfer.options import Count
from dinfer.step import Window


@dataclass(frozen=True)
class Blockwise:
    """Blocks of `length` positions (0 = one block), counted from position 0 if `aligned`, else
    from the answer.
    """

    length: Count = 32
    aligned: bool = False

    def window(self, canvas: Canvas) -> Window | None:
        """The leftmost block with an undecided position."""
        first = canvas.first_masked()
        if first is None:
            return None
        base = 0 if self.aligned or first < canvas.answer else canvas.answer
        length = self.length or len(canvas)
        start = base + (first - base) // length * length
        return Window(start, min(start + length, len(canvas)))
