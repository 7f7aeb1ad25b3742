"""The canvas of one sequence, as iterations and cache policies see it. Lives on the host; L
positions.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dinfer.errors import EngineError


class Canvas:
    """Token ids, which of them are masked, and what has changed since its row last ran.

    tokens [L] int64 (at masked positions the mask id, or the draft where it is None); masked [L]
    bool; given [L] bool, text that was there from the start; stale [L] bool. answer: first position
    of the answer. limit: positions from here on need no decision (after the first end-of-text,
    after max_tokens). block: length of the model's attention blocks, None for full attention; base:
    where they are counted from. revisable: set tokens of the open window that were not given may
    still change. horizon: first position that the open window leaves out. chosen: the last window
    that was narrowed to what the model proposed, (start, stop). ends: ids that end the answer (none
    where it is filled in any case). end: where the answer ends without such an id. ceiling: most
    positions that the canvas may have.
    """

    revisable = False
    chosen = (0, 0)
    ends: frozenset[int] = frozenset()

    def __init__(
        self,
        tokens: Sequence[int | None],
        answer: int,
        limit: int,
        mask_id: int | None,
        block: int | None,
        base: int = 0,
    ) -> None:
        filled = [-1 if token is None else token for token in tokens]
        self.tokens: npt.NDArray[np.int64] = np.array(filled, dtype=np.int64)
        self.masked: npt.NDArray[np.bool_] = self.tokens < 0
        self.given: npt.NDArray[np.bool_] = ~self.masked
        self.tokens[self.masked] = mask_id or 0
        self.stale = np.ones(len(filled), dtype=bool)
        self.horizon = len(filled)
        self.answer, self.limit, self.mask_id = answer, limit, mask_id
        self.block, self.base = block, base
        self.end, self.ceiling = limit, len(filled)
        self._fixed = self._given_end()

    def __len__(self) -> int:
        return len(self.tokens)

    def first_masked(self) -> int | None:
        """The leftmost masked position before `limit`, or None when there is none."""
        masked = self.masked[: self.limit]
        place = int(masked.argmax()) if len(masked) else 0
        return place if len(masked) and masked[place] else None

    def undecided(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Masked positions of a span that still need a decision. Without a mask token, what lies
        behind the limit does too: the rest would see noise there.
        """
        stop = stop if self.mask_id is None else min(stop, self.limit)
        return self.masked[start:stop].nonzero()[0] + start

    def decidable(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Positions of a span that are decided by the request's own steps, set or not."""
        return (~self.given[start : min(stop, self.limit)]).nonzero()[0] + start

    def first_changed(self) -> int:
        """The leftmost position whose token was set after its row last ran (the canvas length when
        there is none).
        """
        changed = self.stale > self.masked  # stale and not masked
        place = int(changed.argmax()) if len(changed) else 0
        return place if len(changed) and changed[place] else len(self)

    def reach(self, stop: int) -> int:
        """First position that rows before `stop` do not attend to: the end of their block, or the
        horizon.
        """
        if self.block is None:
            return self.horizon
        blocks = -(-(stop - self.base) // self.block)
        return min(len(self), self.base + blocks * self.block)

    def block_start(self, position: int) -> int:
        """First position of the block that holds `position`."""
        assert self.block is not None
        return max(0, position - (position - self.base) % self.block)

    def open_start(self) -> int:
        """First open position (the canvas length when nothing before `limit` is masked)."""
        first = self.first_masked()
        return len(self) if first is None else self.block_start(first)

    def given_from(self, place: int) -> bool:
        """Whether any position from `place` on was given."""
        return place < self._fixed

    def _given_end(self) -> int:
        """Behind the last position that was given."""
        return max(self.given.nonzero()[0].tolist(), default=-1) + 1

    def write(self, positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Sets tokens."""
        if self.given[positions].any():
            raise EngineError("A decoder may not write over given text.")
        self.tokens[positions] = tokens
        self.masked[positions] = False
        self.stale[positions] = True

    def draft(self, positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """What masked positions show the model in the place of a mask token."""
        if self.mask_id is not None or not self.masked[positions].all():
            raise EngineError("Only masked positions of a model without a mask token show drafts.")
        self.tokens[positions] = tokens

    def take_back(self, positions: npt.NDArray[np.int64]) -> None:
        """Masks set positions again."""
        if self.mask_id is None and len(positions):
            raise EngineError("A model without a mask token cannot take tokens back.")
        if self.given[positions].any():
            raise EngineError("A decoder may not take given text back.")
        self.tokens[positions] = self.mask_id or 0
        self.masked[positions] = True
        self.stale[positions] = True

    def cut(self, length: int) -> None:
        """Leaves the positions from `length` on out, until the canvas grows again."""
        for name in ("tokens", "masked", "given", "stale"):
            setattr(self, name, getattr(self, name)[:length])
        self._fixed = self._given_end()
        self._bound(min(self.end, length))

    def insert(self, place: int, count: int) -> None:
        """Puts `count` masks before `place`; what lies from there on moves."""
        if self.mask_id is None or self.given_from(place) or len(self) + count > self.ceiling:
            raise EngineError(f"The canvas cannot grow by {count} positions at {place}.")
        for name, blank in (("tokens", self.mask_id), ("masked", True), ("given", False)):
            setattr(self, name, np.insert(getattr(self, name), place, [blank] * count))
        self.stale = np.append(self.stale[:place], np.ones(len(self) - place, dtype=bool))
        self._bound(self.end + count)

    def _bound(self, end: int) -> None:
        self.limit = self.end = end
        self.horizon = len(self)
