"""Attention of ragged rows over stored keys and values.

T rows, S stored slots, H query heads, K key/value heads, d head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Span:
    """Rows `start:stop` that may see the same slots: a slice of the arena where they lie in a run,
    else their list.
    """

    start: int
    stop: int
    slots: slice | Tensor


def attention(q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor, spans: Sequence[Span]) -> Tensor:
    """softmax(q k / sqrt(d)) v for each span over exactly the slots it may see; returns [T, H, d].

    There is no mask and no padding: rows of a span see all of its slots. Query heads that share a
    key head are folded into rows, so grouped heads cost no copy.
    """
    kv_heads, size = keys_SKd.shape[1:]
    out = torch.empty_like(q_THd)
    for span in spans:
        q = (
            q_THd[span.start : span.stop]
            .view(span.stop - span.start, kv_heads, -1, size)
            .permute(1, 0, 2, 3)
        )
        k, v = keys_SKd[span.slots].transpose(0, 1), values_SKd[span.slots].transpose(0, 1)
        mixed = scaled_dot_product_attention(q.flatten(1, 2)[None], k[None], v[None])[0]
        out[span.start : span.stop] = (
            mixed.view(kv_heads, -1, q.shape[2], size).permute(1, 0, 2, 3).flatten(1, 2)
        )
    return out


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
            out[span.start : span.stop, head] = (scores.softmax(dim=1) @ v).to(out.dtype)
    return out
