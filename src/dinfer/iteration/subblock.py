"""Fast-dLLM v2's order of work (arXiv 2509.26328): sub-blocks, one after another, of each block."""

from dataclasses import dataclass

from dinfer.canvas import Canvas
from dinfer.errors import RequestError
from dinfer.options import Positive
from dinfer.step import Window


@dataclass(frozen=True)
class Subblock:
    """Sub-blocks of `length` positions of blocks of `block`, both counted from position 0.

    lead: the first position of a block has a window of its own. In a model whose logits are
    shifted it follows from the finished block before it, whatever is masked in its own.
    """

    block: Positive = 32
    length: Positive = 8
    lead: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.block or self.block % self.length:
            raise RequestError(
                f"subblock has block {self.block} and length {self.length};"
                " the length must be 1 or more and divide the block."
            )

    def window(self, canvas: Canvas) -> Window | None:
        """The sub-block of the leftmost undecided position."""
        first = canvas.first_masked()
        if first is None:
            return None
        if self.lead and first % self.block == 0:
            return Window(first, first + 1)
        start = first // self.length * self.length
        return Window(start, min(start + self.length, len(canvas)))
