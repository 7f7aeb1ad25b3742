"""dInfer's hierarchical decoding (arXiv 2510.08666): each run of masks is split at its surest
position, so that neighbours, which depend on each other, are not set at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.step import Commit, Proposal, WindowState, best


@dataclass(frozen=True)
class Hierarchy:
    """Commits the best position of every run of adjacent masks if its confidence exceeds `low`,
    every position above `threshold`, and the best of all in any case.
    """

    threshold: float = 0.9
    low: float = 0.4
    needs: ClassVar[frozenset[str]] = frozenset()
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.threshold <= 1.0:
            raise RequestError(
                f"hierarchy has low {self.low} and threshold {self.threshold};"
                " 0 <= low <= threshold <= 1 is needed."
            )

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Best of each run, all that are sure, best of all."""
        sure = masked & (proposal.confidence > self.threshold)
        heads = best_of_runs(proposal.confidence, masked) & (proposal.confidence > self.low)
        return Commit(sure | heads | best(proposal.confidence, masked), proposal.tokens)


def best_of_runs(score_BW: Tensor, masked_BW: Tensor) -> Tensor:
    """The highest score of each maximal run of adjacent masked positions; ties to the left."""
    width = masked_BW.shape[1]
    before = torch.nn.functional.pad(masked_BW[:, :-1], (1, 0))
    run = (masked_BW & ~before).cumsum(dim=1)  # 1 for the first run; set positions do not matter
    score = torch.where(masked_BW, score_BW, -torch.inf)
    empty = torch.full((len(run), width + 1), -torch.inf, device=score.device)
    top = empty.scatter_reduce(1, run, score, "amax").gather(1, run)
    place = torch.arange(width, device=score.device).expand_as(run)
    hit = masked_BW & (score == top)
    none = torch.full((len(run), width + 1), width, device=score.device)
    first = none.scatter_reduce(1, run, torch.where(hit, place, width), "amin").gather(1, run)
    return hit & (place == first)
