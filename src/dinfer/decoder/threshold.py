"""Fast-dLLM's confidence threshold (arXiv 2505.22618, algorithm 1); SDAR's dynamic decoding is its
strict form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dinfer.decoder.fixed import quotas
from dinfer.options import Count, Positive, Probability
from dinfer.step import Commit, Confidence, Places, Proposal, Rule, WindowState, by_rule, ranks


def leading(chosen: Tensor, masked: Tensor, states: Sequence[WindowState]) -> Tensor:
    """What is chosen [B, W]; in the first step of a window its first position alone, where that is
    masked.
    """
    opens = torch.tensor([state.steps == 0 for state in states], device=masked.device)
    first = torch.zeros_like(masked)
    first[:, 0] = masked[:, 0] & opens
    return torch.where(first.any(dim=1, keepdim=True), first, chosen)


@dataclass(frozen=True)
class Threshold:
    """Commits every token whose confidence reaches `threshold` (`strict`: exceeds it), and the
    best in any case.

    steps: with more than 0, at least the share of the window that `fixed:steps=...` would commit.
    filtered: confidence is what the token has after temperature, top-k and top-p (SDAR's way), not
    its raw probability.
    least: at least so many. lead: the first step of a window commits its first position alone, as
    Fast-dLLM does for models whose logits are shifted. pace: with more than 0, no more in all than
    so many even steps would have committed by now (Fast-dLLM's loop for Dream without a cache).
    """

    threshold: Probability = 0.9
    strict: bool = False
    steps: Count = 0
    filtered: bool = False
    least: Positive = 1
    lead: bool = False
    pace: Count = 0
    monotone: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Nothing but the confidence."""
        return frozenset({"filtered_confidence"}) if self.filtered else frozenset()

    @cached_property
    def rule(self) -> Rule | None:
        """`c >= threshold`, or the best, where nothing else counts."""
        schedules = self.steps or self.pace or self.least > 1 or self.lead
        return None if self.filtered or schedules else self._sure

    def _sure(self, places: Places, confidence: Confidence) -> Places:
        least = np.float32(self.threshold)
        sure = confidence > least if self.strict else confidence >= least
        return sure.nonzero()[0] if sure.any() else confidence.argmax(axis=0, keepdims=True)

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """`c >= threshold`, or among the best that the schedule asks for."""
        if self.rule is not None:
            return by_rule(self.rule, proposal, masked)
        confidence = proposal.filtered_confidence if self.filtered else proposal.confidence
        assert confidence is not None
        sure = confidence > self.threshold if self.strict else confidence >= self.threshold
        rank = ranks(confidence, masked)
        quota = quotas(states, self.steps, masked.device).clamp(min=self.least)
        if self.pace:
            sure = sure & (rank < self._still(masked, states))
        chosen = masked & (sure | (rank < quota))
        return Commit(leading(chosen, masked, states) if self.lead else chosen, proposal.tokens)

    def _still(self, masked: Tensor, states: Sequence[WindowState]) -> Tensor:
        """How many tokens the pace leaves for this step, [B, 1]."""
        due = [s.opened // self.pace * min(s.steps + 1, self.pace) - s.opened for s in states]
        return torch.tensor(due, device=masked.device)[:, None] + masked.sum(dim=1, keepdim=True)
