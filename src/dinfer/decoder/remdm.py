"""ReMDM (arXiv 2503.00307): set tokens are taken back at random, so that early mistakes can be
mended; more steps give better answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.decoder.fixed import quotas
from dinfer.options import Count, Probability
from dinfer.step import Commit, Proposal, WindowState, ranks, recall, remember


@dataclass(frozen=True)
class Remdm:
    """The most confident tokens, so many that the number of set ones grows as `fixed:steps=...`
    would have it; `steps` 0 = by one a step.

    At every step each set token of the window is taken back with probability
    `min(eta, (1 - alpha_s) / alpha_t)`, where alpha is the part that is set before and after the
    step (the paper's cap rule), and as many more are set. by_confidence: the probabilities are
    weighted by softmax(-confidence at the time of setting), with the same mean (the paper's
    confidence rule).
    """

    steps: Count = 0
    eta: Probability = 0.04
    by_confidence: bool = False
    needs: ClassVar[frozenset[str]] = frozenset({"noise"})
    monotone: ClassVar[bool] = False

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Takes some back and sets that many more than the schedule asks for."""
        assert proposal.noise is not None and proposal.editable is not None
        editable, noise = proposal.editable, proposal.noise
        quota = torch.minimum(
            quotas(states, self.steps, masked.device), masked.sum(dim=1, keepdim=True)
        )
        chance = self._chance(masked, editable, quota, states)
        lots = editable & (noise < chance)
        # No more than can be set in their place, so that the schedule is kept.
        spare = masked.sum(dim=1, keepdim=True) - quota
        back = lots & (ranks(chance - noise, lots) < spare)
        count = quota + back.sum(dim=1, keepdim=True)
        mask = masked & (ranks(proposal.confidence, masked) < count)
        was = recall(states, "confidence", torch.zeros_like(proposal.confidence))
        remember(states, "confidence", torch.where(mask, proposal.confidence, was))
        return Commit(mask, proposal.tokens, back=back)

    def _chance(
        self, masked: Tensor, editable: Tensor, quota: Tensor, states: Sequence[WindowState]
    ) -> Tensor:
        """Probability to be taken back, [B, W]."""
        left, held = masked.sum(dim=1, keepdim=True), editable.sum(dim=1, keepdim=True)
        # Both are parts of the same number of positions, which cancels.
        cap = torch.clamp((left - quota) / held.clamp_min(1), max=self.eta)
        if not self.by_confidence:
            return cap.expand(masked.shape)
        was = recall(states, "confidence", torch.zeros(masked.shape, device=masked.device))
        weight = torch.where(editable, -was, -torch.inf).softmax(dim=1).nan_to_num(0.0)
        return cap * weight * held
