"""Several blocks in flight (D2F, arXiv 2508.09192; d3LLM, arXiv 2601.07568, on full attention): the
next block begins before the one in front of it is done.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from dinfer.canvas import Canvas
from dinfer.errors import RequestError
from dinfer.iteration.blockwise import Blockwise
from dinfer.options import Count, Positive, Probability, Range
from dinfer.step import Part, Window


@dataclass(frozen=True)
class Multiblock:
    """Blocks as of `blockwise`, up to `most` at once (0 = any number), decided each by itself.

    A block joins once the one in front of it is set to the share `add`. It is decided in full once
    that one is set to the share `ready`; until then only tokens above the confidence `sure` are
    set.
    """

    length: Positive = 32
    most: Count = 4
    add: Annotated[float, Range(0, 1, above=True)] = 0.1
    ready: Probability = 0.95
    sure: Probability = 0.9
    aligned: bool = False

    def __post_init__(self) -> None:
        if self.add > self.ready:
            raise RequestError(
                f"multiblock has add {self.add} and ready {self.ready}; add must be at most ready."
            )

    @cached_property
    def _blocks(self) -> Blockwise:
        return Blockwise(self.length, self.aligned)

    def window(self, canvas: Canvas) -> Window | None:
        """The leftmost block with an undecided position, and those in flight behind it."""
        first = self._blocks.window(canvas)
        if first is None:
            return None
        parts = [Part(first.start, first.stop)]
        end = min(canvas.limit, len(canvas))
        while parts[-1].stop < end and len(parts) != self.most:
            done = self._share_set(canvas, parts[-1])
            if done < self.add:
                break
            start = parts[-1].stop
            stop = min(start + self.length, len(canvas))
            parts.append(Part(start, stop, None if done >= self.ready else self.sure))
        return Window(first.start, parts[-1].stop, parts=tuple(parts))

    def _share_set(self, canvas: Canvas, part: Part) -> float:
        return 1.0 - float(canvas.masked[part.start : part.stop].mean())
