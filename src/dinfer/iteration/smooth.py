"""Iteration smoothing (dInfer, arXiv 2510.08666): a mask carries on what the step before expected
in its place.
"""

from dataclasses import dataclass
from functools import cached_property

from dinfer.canvas import Canvas
from dinfer.iteration.blockwise import Blockwise
from dinfer.options import Count, NonNegative, Probability
from dinfer.step import Window


@dataclass(frozen=True)
class Smooth:
    """Blocks as of `blockwise`. In step k of the request a mask's input is its embedding plus
    `min(start + growth * k, weight)` times the expected embedding of the step before.

    The paper also begins with a threshold of 1 that falls by 0.02 a step; that is the decoder's.
    """

    length: Count = 32
    aligned: bool = False
    weight: Probability = 0.3
    start: Probability = 0.15
    growth: NonNegative = 0.02

    @cached_property
    def _blocks(self) -> Blockwise:
        return Blockwise(self.length, self.aligned)

    def window(self, canvas: Canvas) -> Window | None:
        """The leftmost block with an undecided position."""
        return self._blocks.window(canvas)

    def mix(self, step: int) -> float:
        """Weight of the expected embedding in the request's step `step`, counted from 0."""
        return min(self.start + self.growth * step, self.weight)
