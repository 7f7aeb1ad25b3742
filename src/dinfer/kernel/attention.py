"""Attention of ragged rows over stored keys and values.

T rows, S stored slots, H query heads, K key/value heads, d head size.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Span:
    """Rows `start:stop` that may see the same slots: a slice of the arena where they lie in a run,
    else their list. seen [rows, slots]: which of them each row sees; None = all.
    """

    start: int
    stop: int
    slots: slice | npt.NDArray[np.int64]
    seen: npt.NDArray[np.bool_] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of rows and slots."""
        slots = self.slots
        seen = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        return self.stop - self.start, seen


@dataclass(frozen=True)
class Group:
    """Spans of one size, which run as one call: `rows` [n * rows] and `slots` [n * seen], or
    slices where the group is a single run; `seen` [n, rows, seen] bool where not all is.
    """

    count: int
    rows: slice | Tensor
    slots: slice | Tensor
    seen: Tensor | None = None


def grouped(spans: Sequence[Span], device: torch.device) -> list[Group]:
    """Spans of a step by their size; made once for all layers."""
    by_size: dict[tuple[tuple[int, int], bool], list[Span]] = defaultdict(list)
    for span in spans:
        by_size[span.size, span.seen is None].append(span)
    return [
        Group(
            len(same),
            _joined([slice(span.start, span.stop) for span in same], device),
            _joined([span.slots for span in same], device),
            _stacked([span.seen for span in same if span.seen is not None], device),
        )
        for same in by_size.values()
    ]


def _stacked(seen: Sequence[npt.NDArray[np.bool_]], device: torch.device) -> Tensor | None:
    return torch.from_numpy(np.stack(seen)).to(device) if seen else None


def _joined(parts: Sequence[slice | npt.NDArray[np.int64]], device: torch.device) -> slice | Tensor:
    if len(parts) == 1 and isinstance(parts[0], slice):
        return parts[0]
    arrays = [np.arange(x.start, x.stop) if isinstance(x, slice) else x for x in parts]
    return torch.from_numpy(np.concatenate(arrays)).to(device)


def attention(
    q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor, groups: Sequence[Group]
) -> Tensor:
    """softmax(q k / sqrt(d)) v for each span over exactly the slots it may see; returns [T, H, d].

    There is no padding, and a mask only where the rows of a span do not all see the same: spans of
    one size share a call. Query heads that share a key head are folded into rows, so grouped heads
    cost no copy.
    """
    kv_heads, size = keys_SKd.shape[1:]
    out = torch.empty_like(q_THd)
    for group in groups:
        q = _part(q_THd, group.rows)
        fan = q.shape[1] // kv_heads
        q = q.view(group.count, -1, kv_heads, fan, size).permute(0, 2, 1, 3, 4).flatten(2, 3)
        k, v = (
            _part(x, group.slots).view(group.count, -1, kv_heads, size).transpose(1, 2)
            for x in (keys_SKd, values_SKd)
        )
        seen = None
        if group.seen is not None:
            seen = group.seen.repeat_interleave(fan, dim=1)[:, None]
        mixed = scaled_dot_product_attention(q, k, v, seen)
        mixed = mixed.view(group.count, kv_heads, -1, fan, size).permute(0, 2, 1, 3, 4)
        mixed = mixed.reshape(-1, kv_heads * fan, size)
        if isinstance(group.rows, Tensor):
            out.index_copy_(0, group.rows, mixed)
        elif len(groups) == 1:
            return mixed  # all the rows there are
        else:
            out[group.rows] = mixed
    return out


def _part(x: Tensor, rows: slice | Tensor) -> Tensor:
    """A view of a run, a copy of scattered rows (on a CPU at five times the speed of indexing)."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def attention_reference(
    q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor, spans: Sequence[Span]
) -> Tensor:
    """The same in float64, head by head, as the formula stands."""
    group = q_THd.shape[1] // keys_SKd.shape[1]
    out = torch.empty_like(q_THd)
    for span in spans:
        for head in range(q_THd.shape[1]):
            k, v = (x[span.slots][:, head // group].double() for x in (keys_SKd, values_SKd))
            scores = q_THd[span.start : span.stop, head].double() @ k.T / q_THd.shape[2] ** 0.5
            if span.seen is not None:
                scores[~torch.from_numpy(span.seen)] = -torch.inf
            out[span.start : span.stop, head] = (scores.softmax(dim=1) @ v).to(out.dtype)
    return out
