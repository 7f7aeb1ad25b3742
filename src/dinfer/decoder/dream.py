"""Dream's samplers (arXiv 2508.15487; their names are its own): a schedule over steps, and four
ways to rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dinfer.decoder.threshold import leading
from dinfer.errors import RequestError
from dinfer.options import Count, NonNegative, Range
from dinfer.step import Commit, Proposal, WindowState, best, ranks

LEAST_NOISE = 1e-6
RANKINGS = ("maskgit", "margin", "entropy", "origin")


@dataclass(frozen=True)
class Dream:
    """Step i of `steps` (0 = one per position) goes from time t to s on a line from 1 to `eps` and
    commits `masked * (1 - s / t)` positions, rounded down, 1 at least, and all in the last step.

    ranking: maskgit by confidence, margin by the best probability minus the second, entropy by low
    entropy; origin sets each position with probability `1 - s / t`. filtered: rank by what
    temperature, top-k and top-p leave of the distribution, as Dream does, or by the raw one. noise:
    with more than 0, positions are drawn from softmax(score / noise) without replacement (Dream's
    alg_temp). lead: the first step commits the first position alone, as Fast-dLLM's loops for Dream
    do in each of their blocks.
    """

    steps: Count = 0
    ranking: str = "entropy"
    filtered: bool = True
    noise: NonNegative = 0.0
    eps: Annotated[float, Range(0, 1, above=True, below=True)] = 1e-3
    lead: bool = False
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.ranking not in RANKINGS:
            raise RequestError(
                f"dream ranking is {self.ranking!r}; it must be one of {', '.join(RANKINGS)}."
            )
        # Scores are divided by it in float32.
        if 0 < self.noise < LEAST_NOISE:
            raise RequestError(
                f"dream noise is {self.noise}; it must be 0 or at least {LEAST_NOISE:g}."
            )

    @property
    def needs(self) -> frozenset[str]:
        """The measure that ranks, and noise where the choice is drawn."""
        if self.ranking == "origin":
            return frozenset({"noise"})
        return frozenset({self._measure, "noise"} if self.noise > 0 else {self._measure})

    @property
    def _measure(self) -> str:
        """The field of Proposal that ranks."""
        measure = "confidence" if self.ranking == "maskgit" else self.ranking
        return f"filtered_{measure}" if self.filtered else measure

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """As many of the best as the schedule says."""
        shares = [self._share(state) for state in states]
        share = torch.tensor(shares, dtype=torch.float64, device=masked.device)[:, None]
        if self.ranking == "origin":
            assert proposal.noise is not None
            drawn = masked & (proposal.noise < share)
            return Commit(drawn | best(-proposal.noise, masked), proposal.tokens)
        count = (masked.sum(dim=1, keepdim=True) * share).long().clamp_min(1)
        chosen = masked & (ranks(self._score(proposal), masked) < count)
        return Commit(leading(chosen, masked, states) if self.lead else chosen, proposal.tokens)

    def _share(self, state: WindowState) -> float:
        """1 - s / t, and 1 in the last step."""
        steps = self.steps or max(1, state.opened)
        if state.steps >= steps - 1:
            return 1.0
        t, s = (1 + (self.eps - 1) * (state.steps + i) / steps for i in (0, 1))
        return 1 - s / t

    def _score(self, proposal: Proposal) -> Tensor:
        score: Tensor = getattr(proposal, self._measure)
        score = -score if self.ranking == "entropy" else score
        if self.noise == 0:
            return score
        assert proposal.noise is not None
        # The largest of score + Gumbel noise is a draw without replacement (arXiv 1903.06059).
        return score / self.noise - (-proposal.noise.log()).log()
