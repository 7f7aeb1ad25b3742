"""DAEDAL (arXiv 2508.00819): an answer whose length grows as needed."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dinfer.canvas import Canvas
from dinfer.iteration.blockwise import Blockwise
from dinfer.options import Count, Positive, Probability
from dinfer.step import Growth, ProposalView, Window


@dataclass(frozen=True)
class Daedal:
    """Blocks as of `blockwise`, on a canvas that begins with `initial` masks (0 = max_tokens, which
    is the ceiling in any case) and grows by `by`.

    Certainty of the end is the sum of the confidences of the last `tail` positions where an end of
    text is proposed, over `tail`. As long as nothing is set and it is below `begin`, nothing is set
    and the canvas grows at its end. Later, as long as it is below `enough`, the least sure position
    of the block gives way to `by` masks, if its confidence is below `low`.

    A canvas keeps its length from the outset where text follows the blanks, where no end of text
    ends the answer, and where attention is block-causal: there nobody sees the end.
    """

    length: Count = 32
    initial: Count = 64
    by: Positive = 8
    begin_at: Probability = 0.5
    enough: Probability = 0.9
    low: Probability = 0.1
    tail: Positive = 32

    @cached_property
    def _blocks(self) -> Blockwise:
        return Blockwise(self.length)

    def window(self, canvas: Canvas) -> Window | None:
        """The leftmost block with an undecided position."""
        return self._blocks.window(canvas)

    def begin(self, canvas: Canvas) -> None:
        """Leaves out all but the first masks."""
        fixed = canvas.given_from(canvas.answer)
        if self.initial and canvas.ends and canvas.block is None and not fixed:
            canvas.cut(min(canvas.answer + self.initial, len(canvas)))

    def grow(self, canvas: Canvas, window: Window, seen: ProposalView) -> Growth | None:
        """Where masks are put in, the least sure position first."""
        room = canvas.ceiling - len(canvas)
        certain = self._certain(canvas, seen)
        if canvas.masked[canvas.answer :].all() and certain < self.begin_at:
            return Growth((len(canvas),), min(self.by, room), wait=True) if room else None
        unsure = canvas.masked[seen.positions] & (seen.confidence < self.low)
        unsure &= seen.positions < window.stop
        count = min(self.by - 1, room)
        if certain >= self.enough or not unsure.any() or not count:
            return None
        order = seen.confidence[unsure].argsort(kind="stable")
        return Growth(tuple(seen.positions[unsure][order].tolist()), count)

    def _certain(self, canvas: Canvas, seen: ProposalView) -> float:
        """How sure the model is that the text ends within the canvas."""
        ends = np.isin(seen.tokens, list(canvas.ends)) & canvas.masked[seen.positions]
        return float(seen.confidence[ends][-self.tail :].sum()) / self.tail
