"""Entropy-bounded unmasking (EB-sampler, arXiv 2505.24857, section 4): as many tokens at once as
their joint uncertainty allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.options import NonNegative
from dinfer.step import Commit, Proposal, WindowState, ranks


@dataclass(frozen=True)
class Entropy:
    """Commits the most positions, by rising entropy (nats), whose entropies add up to `bound` at
    most, the largest of them not counted.
    """

    bound: NonNegative = 0.1
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    monotone: ClassVar[bool] = True

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """The surest always: before it there is nothing to add up."""
        assert proposal.entropy is not None
        return Commit(within(proposal.entropy, masked, self.bound), proposal.tokens)


def within(entropy_BW: Tensor, masked: Tensor, bound: float) -> Tensor:
    """The most masked positions, by rising entropy, whose entropies add up to `bound` at most, the
    largest of them not counted.
    """
    rank = ranks(-entropy_BW, masked)
    order = rank.argsort(dim=1, stable=True)
    ordered = torch.where(masked, entropy_BW, 0.0).gather(1, order)
    before = ordered.cumsum(dim=1) - ordered
    # Rounding must not make the first one's sum, which is 0, exceed a bound of 0.
    before[:, 0] = 0.0
    return masked & torch.zeros_like(masked).scatter(1, order, before <= bound)
