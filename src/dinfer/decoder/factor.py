"""Fast-dLLM's factor rule (arXiv 2505.22618, section 3.3): the more tokens at once, the surer each
has to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.options import NonNegative
from dinfer.step import Commit, Proposal, WindowState, ranks


@dataclass(frozen=True)
class Factor:
    """Commits the largest n such that the j-th best confidence is at least `1 - factor / (j + 1)`
    for j = 2..n.
    """

    factor: NonNegative = 1.0
    needs: ClassVar[frozenset[str]] = frozenset()
    monotone: ClassVar[bool] = True

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """The best always, and the run of ranks after it that keep the bound."""
        rank = ranks(proposal.confidence, masked)
        keeps = (rank == 0) | (proposal.confidence >= 1 - self.factor / (rank + 2))
        failed = torch.where(masked & ~keeps, rank, rank.shape[1] + 1)
        return Commit(masked & (rank < failed.amin(dim=1, keepdim=True)), proposal.tokens)
