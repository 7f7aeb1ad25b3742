"""The likeliest token of each row and its probability, without the row's logits.

R rows, D hidden, V vocabulary. Online softmax (arXiv 1805.02867) over pieces of the vocabulary:
a piece stays in the cache, and no matrix of the vocabulary's width is allocated, whose fresh pages
cost a CPU more time than the arithmetic on them.

Where all logits of a row are needed after all, `logits_of` and `normaliser` go through the same
pieces, so that a row's probability is the same to the last bit whatever else is asked for.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from dinfer.kernel.padding import pad_rows

PIECE = 16384
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


class GreedySearch(Protocol):
    """What `greedy_tokens` does without limits, of a head that brings its own as its `search`."""

    def __call__(
        self, x_TD: Tensor, mask_id: int | None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """For some of the rows, [R] int64; None = all."""
        ...


def greedy_search(head: Head) -> GreedySearch | None:
    """The head's own search; None = it has none."""
    found: GreedySearch | None = getattr(head, "search", None)
    return found


def greedy_tokens(
    hidden_RD: Tensor, head: Head, mask_id: int | None, allowed_RV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens [R] int64 and their probabilities [R] float32; the mask token, where there is one, has
    none. `allowed_RV` (bool) limits the choice and leaves the probabilities alone.
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
    best = hidden_RD.new_full((len(hidden_RD),), -torch.inf, dtype=torch.float32)
    tokens = torch.zeros(len(hidden_RD), dtype=torch.int64, device=hidden_RD.device)
    norm = None
    for part in _pieces(head.out_features, hidden_RD.device):
        logits = _logits(hidden_RD, head, part)
        if mask_id is not None and part.start <= mask_id < part.stop:
            logits[:, mask_id - part.start] = -torch.inf
        out = None if allowed_RV is None else ~allowed_RV[:, part]
        choice = logits if out is None else logits.masked_fill(out, -torch.inf)
        top = choice.amax(dim=1)
        # To find a maximum's place costs a CPU several times as much as the maximum, and few pieces
        # have a row's best so far.
        rows = slice(None) if norm is None else (top > best).nonzero().squeeze(1)
        tokens[rows] = choice[rows].argmax(dim=1) + part.start
        best = torch.maximum(best, top)
        own = top if choice is logits else logits.amax(dim=1)
        norm = _joined(norm, _of_piece(logits, own))
    assert norm is not None
    return tokens, (best - norm[0]).exp() / norm[1]


def logits_of(hidden_RD: Tensor, head: Head) -> Tensor:
    """All logits [R, V], float32."""
    parts = _pieces(head.out_features, hidden_RD.device)
    return torch.cat([_logits(hidden_RD, head, part) for part in parts], dim=1)


def _logits(hidden_RD: Tensor, head: Head, part: slice) -> Tensor:
    return head.columns(pad_rows(hidden_RD), part.start, part.stop)[: len(hidden_RD)].float()


def normaliser(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Best logit and `sum exp(logit - best)` of each row, [R]: the probability of a token is
    `exp(logit - best) / sum`.
    """
    norm = None
    for part in _pieces(logits_RV.shape[1], logits_RV.device):
        logits = logits_RV[:, part]
        norm = _joined(norm, _of_piece(logits, logits.amax(dim=1)))
    assert norm is not None
    return norm


def _pieces(vocab: int, device: torch.device) -> Iterator[slice]:
    width = PIECE if device.type == "cpu" else vocab
    return (slice(start, min(start + width, vocab)) for start in range(0, vocab, width))


def _of_piece(logits_RC: Tensor, best_R: Tensor) -> tuple[Tensor, Tensor]:
    # Infinity less itself is no number, where a piece is the mask alone.
    best_R = best_R.clamp_min(torch.finfo(logits_RC.dtype).min)
    return best_R, (logits_RC - best_R[:, None]).exp_().sum(dim=1)


def _joined(
    norm: tuple[Tensor, Tensor] | None, later: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Of the pieces so far and one more."""
    if norm is None:
        return later
    best = torch.maximum(norm[0], later[0])
    return best, norm[1] * (norm[0] - best).exp() + later[1] * (later[0] - best).exp()
