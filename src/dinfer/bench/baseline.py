"""Fast-dLLM's decoding (arXiv 2505.22618) as its paper describes it, for comparison without a
checkout: one request at a time, whole canvas at each block's start, logits and a float64 softmax
for every row, a fixed number of blocks whatever the answer's length.

L canvas positions, T rows of a pass, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dinfer.attention.sdpa import Segment, attention, grouped
from dinfer.nn.transformer import Transformer

Mode = Literal["none", "prefix", "dual"]


@dataclass(frozen=True)
class Settings:
    """Canvas and rule: `threshold` commits what is at least that sure (and the best), None an even
    share of the block at each of `steps` per block.
    """

    length: int
    block: int = 32
    mode: Mode = "dual"
    threshold: float | None = 0.9
    steps: int = 32


class Stored:
    """Keys and values of the whole canvas, each [L, K, d] a layer; rows that run overwrite them."""

    def __init__(self, model: Transformer, length: int) -> None:
        shape, weight = model.shape, model.embedding.weight
        size = (shape.layers, 2, length, shape.kv_heads, shape.head_size)
        self.arena = torch.empty(size, dtype=weight.dtype, device=weight.device)

    def run(self, model: Transformer, tokens_L: Tensor, rows: slice) -> Tensor:
        """Logits [T, V] of the rows, which see everything stored."""
        positions = torch.arange(len(tokens_L), device=tokens_L.device)[rows]

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            self.arena[layer, 0, rows], self.arena[layer, 1, rows] = k_TKd, v_TKd
            everything = Segment(0, len(q_THd), slice(0, len(tokens_L)))
            keys, values = self.arena[layer]
            return attention(q_THd, keys, values, grouped([everything], q_THd.device))

        logits: Tensor = model.head(model(model.embed(tokens_L[rows]), positions, attend))
        return logits


def chosen(logits_TV: Tensor, masked_T: Tensor, count: int, threshold: float | None) -> Tensor:
    """Rows to set [T] bool: the `count` surest, or with a threshold those at least that sure and
    the surest.
    """
    confidence = logits_TV.double().softmax(dim=1).amax(dim=1)
    confidence = torch.where(masked_T, confidence, -torch.inf)
    most = int(masked_T.sum()) if threshold is not None else count
    values, order = confidence.topk(most)
    if threshold is not None and most:
        keep = values >= threshold
        keep[0] = True
        order = order[keep]
    found = torch.zeros_like(masked_T)
    found[order] = True
    return found & masked_T


@torch.inference_mode()
def generate(
    model: Transformer, prompt: Sequence[int], mask_id: int, settings: Settings
) -> tuple[list[int], int]:
    """The answer's token ids, and the number of forward passes."""
    start, length = len(prompt), len(prompt) + settings.length
    device = model.embedding.weight.device
    tokens = torch.full((length,), mask_id, device=device)
    tokens[:start] = torch.tensor(list(prompt), device=device)
    stored, passes = Stored(model, length), 0
    for low in range(start, length, settings.block):
        high = low + settings.block
        share, more = divmod(settings.block, settings.steps)
        step = 0
        while True:
            rows = slice(0, length)
            if step and settings.mode != "none":
                rows = slice(low, high if settings.mode == "dual" else length)
            logits = stored.run(model, tokens, rows)
            masked = tokens[rows] == mask_id
            masked[max(0, high - rows.start) :] = False
            found = chosen(logits, masked, share + (step < more), settings.threshold)
            tokens[rows] = torch.where(found, logits.argmax(dim=1), tokens[rows])
            passes, step = passes + 1, step + 1
            # The cached loops look for masks only after a pass of their own.
            looked = settings.mode == "none" or step > 1
            if looked and not (tokens[low:high] == mask_id).any():
                break
    return tokens[start:].tolist(), passes
