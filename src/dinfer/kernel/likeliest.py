"""The likeliest token of each row and its probability, without the row's logits.

R rows, D hidden, V vocabulary. Online softmax (arXiv 1805.02867) over pieces of the vocabulary:
a piece stays in the cache, and no matrix of the vocabulary's width is allocated, whose fresh pages
cost a CPU more time than the arithmetic on them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PIECE = 8192
"""Columns of logits that exist at once on a CPU; a GPU takes all of them."""

GROUP = 256
"""Rows whose logits exist at once."""


class Head(Protocol):
    """A linear map to the vocabulary."""

    out_features: int

    def __call__(self, x_RD: Tensor) -> Tensor:
        """All logits [R, V]."""
        ...

    def columns(self, x_RD: Tensor, start: int, stop: int) -> Tensor:
        """Logits [R, stop - start] of a run of the vocabulary."""
        ...


@dataclass(frozen=True)
class _Found:
    """Of a piece: the best logit and `sum exp(logit - best)`, the best one that may be chosen, and
    its token, each [R].
    """

    best: Tensor
    total: Tensor
    chosen: Tensor
    tokens: Tensor

    def with_later(self, later: "_Found") -> "_Found":
        """Of this piece and a later one together; of equals the earlier token stays."""
        best = torch.maximum(self.best, later.best)
        total = self.total * (self.best - best).exp() + later.total * (later.best - best).exp()
        tokens = torch.where(later.chosen > self.chosen, later.tokens, self.tokens)
        return _Found(best, total, torch.maximum(self.chosen, later.chosen), tokens)


def likeliest(
    hidden_RD: Tensor, head: Head, mask_id: int | None, allowed_RV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens [R] int64 and their probabilities [R] float32; the mask token, where there is
    one, has none.

    `allowed_RV` (bool) limits the choice and leaves the probabilities alone.
    """
    parts = [
        _of_group(hidden_RD[start : start + GROUP], head, mask_id,
                  None if allowed_RV is None else allowed_RV[start : start + GROUP])
        for start in range(0, max(1, len(hidden_RD)), GROUP)
    ]  # fmt: skip
    tokens, probabilities = (torch.cat(each) for each in zip(*parts, strict=True))
    return tokens, probabilities


def _of_group(
    hidden_RD: Tensor, head: Head, mask_id: int | None, allowed_RV: Tensor | None
) -> tuple[Tensor, Tensor]:
    width = PIECE if hidden_RD.device.type == "cpu" else head.out_features
    found: _Found | None = None
    for start in range(0, head.out_features, width):
        stop = min(start + width, head.out_features)
        logits = head.columns(hidden_RD, start, stop).float()
        # The least number and not infinity, which less itself is no number where a piece is the
        # mask alone.
        least = torch.finfo(logits.dtype).min
        if mask_id is not None and start <= mask_id < stop:
            logits[:, mask_id - start] = least
        if allowed_RV is None:
            chosen, tokens = logits.max(dim=1)
            best = chosen
        else:
            chosen, tokens = logits.masked_fill(~allowed_RV[:, start:stop], least).max(dim=1)
            best = logits.amax(dim=1)
        total = logits.sub_(best[:, None]).exp_().sum(dim=1)
        piece = _Found(best, total, chosen, tokens + start)
        found = piece if found is None else found.with_later(piece)
    assert found is not None
    return found.tokens, (found.chosen - found.best).exp() / found.total
