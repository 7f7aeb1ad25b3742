"""Attention of shadow rows: masks that stand beside set positions and see all but these.

S shadow rows, N stored slots that a span sees, H query heads, K key/value heads, G of the former to
one of the latter, d head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dinfer.attention.sdpa import Segment


@dataclass(frozen=True)
class SelfMaskedRows:
    """Shadow rows with the same sight; `columns` [rows of the span] int64: which of the slots each
    stands for, and does not see.
    """

    span: Segment
    columns: Tensor


def self_masked_attention(
    q_SHd: Tensor,
    k_SKd: Tensor,
    v_SKd: Tensor,
    keys: Tensor,
    values: Tensor,
    shades: Sequence[SelfMaskedRows],
) -> Tensor:
    """softmax(q k / sqrt(d)) v over the slots of each span, with a row's own key and value in the
    place of the column it stands for; returns [S, H, d]. Nothing is stored.
    """
    out, size = torch.empty_like(q_SHd), q_SHd.shape[2]
    for shade in shades:
        rows, column = slice(shade.span.start, shade.span.stop), shade.columns
        k, v = k_SKd[rows].transpose(0, 1), v_SKd[rows].transpose(0, 1)  # [K, n, d]
        stored_k, stored_v = (x[shade.span.slots].transpose(0, 1) for x in (keys, values))
        q = q_SHd[rows].reshape(len(column), len(k), -1, size).permute(1, 2, 0, 3)  # [K, G, n, d]
        scores = q @ stored_k[:, None].transpose(2, 3)  # [K, G, n, N]
        place = column[:, None].expand(*scores.shape[:3], 1)
        scores = scores.scatter(3, place, (q * k[:, None]).sum(dim=3, keepdim=True))
        weight = (scores.float() / size**0.5).softmax(dim=3).to(v.dtype)
        # The column's stored value went in with the weight of the row's own.
        swap = weight.gather(3, place) * (v - stored_v[:, column])[:, None]
        mixed = weight @ stored_v[:, None] + swap
        out[rows] = mixed.permute(2, 0, 1, 3).flatten(1, 2)
    return out
