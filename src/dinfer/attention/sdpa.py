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
class Segment:
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


@dataclass(frozen=True)
class Groups:
    """All spans of a step. order [T]: where each row lies in what the groups give, one after the
    other; None: rows lie there in their own order.
    """

    each: list[Group]
    order: Tensor | None = None


def grouped(spans: Sequence[Segment], device: torch.device) -> Groups:
    """Spans of a step as they run best there; made once for all layers.

    On a CPU each stays alone: copying what several read to one place takes longer than the calls
    that it saves.
    """
    if device.type == "cpu":
        return Groups([_group([span], device) for span in spans])
    return by_size(spans, device)


def by_size(spans: Sequence[Segment], device: torch.device) -> Groups:
    """Spans of a step, those of one size in one call."""
    groups: dict[tuple[tuple[int, int], bool], list[Segment]] = defaultdict(list)
    for span in spans:
        groups[span.size, span.seen is None].append(span)
    each = [_group(same, device) for same in groups.values()]
    if len(each) < 2:
        return Groups(each)
    rows = [np.arange(span.start, span.stop) for same in groups.values() for span in same]
    return Groups(each, torch.from_numpy(np.argsort(np.concatenate(rows))).to(device))


def _group(same: Sequence[Segment], device: torch.device) -> Group:
    return Group(
        len(same),
        _joined([slice(span.start, span.stop) for span in same], device),
        _joined([span.slots for span in same], device),
        _stacked([span.seen for span in same if span.seen is not None], device),
    )


def _stacked(seen: Sequence[npt.NDArray[np.bool_]], device: torch.device) -> Tensor | None:
    return torch.from_numpy(np.stack(seen)).to(device) if seen else None


def _joined(parts: Sequence[slice | npt.NDArray[np.int64]], device: torch.device) -> slice | Tensor:
    if len(parts) == 1 and isinstance(parts[0], slice):
        return parts[0]
    arrays = [np.arange(x.start, x.stop) if isinstance(x, slice) else x for x in parts]
    return torch.from_numpy(np.concatenate(arrays)).to(device)


def attention(q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor, groups: Groups) -> Tensor:
    """softmax(q k / sqrt(d)) v for each span over exactly the slots it may see; returns [T, H, d].

    There is no padding, and a mask only where the rows of a span do not all see the same. Query
    heads that share a key head are folded into rows, so grouped heads cost no copy of keys.
    """
    if not groups.each:
        return torch.empty_like(q_THd)  # no rows
    kv_heads, size = keys_SKd.shape[1:]
    fan = q_THd.shape[1] // kv_heads
    # Channels of the query heads of a key head side by side, [K, T, fan * d].
    q_KTC = q_THd.view(len(q_THd), kv_heads, fan * size).transpose(0, 1)
    if fan > 1:
        q_KTC = q_KTC.contiguous()
    keys, values = keys_SKd.transpose(0, 1), values_SKd.transpose(0, 1)
    parts = []
    for group in groups.each:
        q = _part(q_KTC, group.rows, group.count).view(group.count, kv_heads, -1, size)
        k, v = (_part(x, group.slots, group.count) for x in (keys, values))
        seen = None
        if group.seen is not None:
            seen = group.seen.repeat_interleave(fan, dim=1)[:, None]
        mixed = scaled_dot_product_attention(q, k, v, seen)
        parts.append(mixed.transpose(1, 2).reshape(-1, fan, kv_heads, size))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if groups.order is not None:
        out = out.index_select(0, groups.order)
    return out.transpose(1, 2).reshape(q_THd.shape)


def _part(x_KNC: Tensor, rows: slice | Tensor, count: int) -> Tensor:
    """[count, K, n, C]: a view of a run, a copy of scattered rows."""
    if isinstance(rows, slice):
        return x_KNC.narrow(1, rows.start, rows.stop - rows.start)[None]
    part = x_KNC.index_select(1, rows)
    return part.view(len(part), count, -1, part.shape[2]).transpose(0, 1)


def attention_reference(
    q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor, spans: Sequence[Segment]
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
