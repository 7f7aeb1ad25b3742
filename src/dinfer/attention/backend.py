"""Attention of a step's rows over what the pool holds."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dinfer.attention.sdpa import Groups, Segment, attention, grouped
from dinfer.attention.self_masked import SelfMaskedRows, self_masked_attention
from dinfer.kv.pool import KVCachePool


@dataclass(frozen=True)
class StoredKV:
    """An `Attend` for one step. slots_T: where the rows' keys and values go; length: positions are
    below it; windows: that of each layer; spans: who sees what, for each window; shades: the shadow
    rows behind the others. Rows behind all these see nothing, and stand there to make up a number.
    """

    pool: KVCachePool
    slots_T: Tensor
    length: int
    windows: list[int | None]
    spans: dict[int | None, list[Segment]]
    shades: list[SelfMaskedRows]

    @cached_property
    def _groups(self) -> dict[int | None, Groups]:
        return {window: grouped(some, self.pool.device) for window, some in self.spans.items()}

    def __call__(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Stores the rows' keys and values and mixes what they see, [T, H, d]."""
        count = len(self.slots_T)
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        keys.index_copy_(0, self.slots_T, k_TKd[:count])
        values.index_copy_(0, self.slots_T, v_TKd[:count])
        parts = [attention(q_THd[:count], keys, values, self._groups[self.windows[layer]])]
        if self.shades:
            stop = count + self.shades[-1].span.stop
            q, k, v = (x[count:stop] for x in (q_THd, k_TKd, v_TKd))
            parts.append(self_masked_attention(q, k, v, keys, values, self.shades))
            count = stop
        if count < len(q_THd):
            parts.append(torch.zeros_like(q_THd[count:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
