"""LLaDA's fixed schedule (arXiv 2502.09992, algorithm 5): an even share of the window at each of
its steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.options import Count
from dinfer.step import Commit, Proposal, WindowState, ranks

RANKINGS = ("low_confidence", "random", "sequential")


def quotas(states: Sequence[WindowState], steps: int, device: torch.device) -> Tensor:
    """Tokens each window commits now, [B, 1]: `n // steps`, one more in its first `n % steps`
    steps; 1 at least.
    """
    if steps == 0:
        return torch.ones(len(states), 1, dtype=torch.int64, device=device)
    share = [max(1, s.opened // steps + (s.steps < s.opened % steps)) for s in states]
    return torch.tensor(share, device=device)[:, None]


@dataclass(frozen=True)
class Fixed:
    """`steps` per window (0 = one token a step), best first by `ranking`.

    low_confidence takes the most confident tokens (the name is that of LLaDA's option: the rest is
    remasked); random and sequential take any, or the leftmost.
    """

    steps: Count = 0
    ranking: str = "low_confidence"
    needs: ClassVar[frozenset[str]] = frozenset({"noise"})
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ranking not in RANKINGS:
            raise RequestError(
                f"fixed ranking is {self.ranking!r}; it must be one of {', '.join(RANKINGS)}."
            )

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """The best of the ranking, as many as the schedule says."""
        chosen = ranks(self._score(proposal), masked) < quotas(states, self.steps, masked.device)
        return Commit(masked & chosen, proposal.tokens)

    def _score(self, proposal: Proposal) -> Tensor:
        if self.ranking == "low_confidence":
            return proposal.confidence
        if self.ranking == "random":
            assert proposal.noise is not None
            return proposal.noise
        return -torch.arange(proposal.tokens.shape[1], device=proposal.tokens.device).expand(
            proposal.tokens.shape
        )
