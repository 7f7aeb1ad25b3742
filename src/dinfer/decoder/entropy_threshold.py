"""A threshold on the entropy, as dParallel (arXiv 2509.26488) and d3LLM (arXiv 2601.07568) decode;
with `slope`, WeDLM's preference for early positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.options import NonNegative
from dinfer.step import Commit, Proposal, WindowState, best


@dataclass(frozen=True)
class EntropyThreshold:
    """Commits every position whose entropy (nats) plus `slope` times its distance from the
    leftmost masked one is at most `threshold`, and the lowest in any case.

    Made for distilled models; WeDLM takes threshold 0.4 and slope 0.02.
    """

    threshold: NonNegative = 0.4
    slope: NonNegative = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    monotone: ClassVar[bool] = True

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """`H + slope * distance <= threshold`, or the lowest."""
        assert proposal.entropy is not None
        place = torch.arange(masked.shape[1], device=masked.device)
        first = torch.where(masked, place, masked.shape[1]).amin(dim=1, keepdim=True)
        cost = proposal.entropy + self.slope * (place - first)
        return Commit(masked & (cost <= self.threshold) | best(-cost, masked), proposal.tokens)
