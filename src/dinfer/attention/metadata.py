"""Who sees whom: spans of rows and the stored slots that they attend to. Names no model."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dinfer.attention.sdpa import Segment
from dinfer.engine.sequence import BlockTable, SequenceState

Ids = npt.NDArray[np.int64]
CHUNK = 128
"""Rows of a causal text that share a mask; it is as wide as what the last of them sees."""


@dataclass(frozen=True)
class AttentionMetadata:
    """The attention pattern of a model. block: length of its blocks, None for full attention;
    causal: set text sees what lies before it, and the open blocks one another.
    """

    block: int | None
    causal: bool = False

    def spans(
        self,
        sequence: SequenceState,
        place: BlockTable,
        rows: Ids,
        offset: int,
        window: int | None = None,
    ) -> Iterator[Segment]:
        """Spans of the rows at the positions `rows`, the first of them row `offset` of the batch.

        window: how many positions a layer's rows see, their own among them (of a causal model; in
        its open blocks all see one another, and the last `window - 1` positions before them).
        """
        plan = sequence.plan
        assert plan is not None
        if self.causal:
            return self._causal(sequence, place, rows, offset, window)
        if self.block is None:
            return iter(
                [Segment(offset, offset + len(rows), _slots(place, 0, plan.visible, plan.also))]
            )
        ends = (rows // self.block + 1) * self.block
        cuts = np.flatnonzero(ends[1:] != ends[:-1]) + 1
        return (
            Segment(
                offset + low, offset + high, _slots(place, 0, min(plan.visible, int(ends[low])))
            )
            for low, high in itertools.pairwise([0, *cuts.tolist(), len(rows)])
        )

    def _causal(
        self, sequence: SequenceState, place: BlockTable, rows: Ids, offset: int, window: int | None
    ) -> Iterator[Segment]:
        assert sequence.plan is not None
        start, visible = sequence.canvas.open_start(), sequence.plan.visible
        text = int(rows.searchsorted(start))
        for low in range(0, text, CHUNK):
            chunk = rows[low : min(low + CHUNK, text)]
            first = 0 if window is None else max(0, int(chunk[0]) - window + 1)
            seen = np.arange(first, chunk[-1] + 1)
            mask = seen <= chunk[:, None]
            if window is not None:
                mask &= seen > chunk[:, None] - window
            slots = _slots(place, first, int(chunk[-1]) + 1)
            yield Segment(offset + low, offset + low + len(chunk), slots, mask)
        if text < len(rows):
            first = 0 if window is None else max(0, start - window + 1)
            yield Segment(offset + text, offset + len(rows), _slots(place, first, visible))


def _slots(place: BlockTable, start: int, stop: int, also: tuple[int, ...] = ()) -> slice | Ids:
    if place.in_one_run and stop and not also:
        first = int(place.slots[0])
        return slice(first + start, first + stop)
    return np.concatenate((place.slots[start:stop], place.slots[list(also)]))
