"""CreditDecoding (arXiv 2510.06133): a token that was the likeliest in earlier steps is trusted
sooner.

B windows, W positions, K likeliest tokens, S credited tokens of a position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dinfer.options import NonNegative, Probability, Range
from dinfer.step import NUM_TOP, Commit, Proposal, WindowState, best, recall, remember


@dataclass(frozen=True)
class Credit:
    """Threshold decoding from `logits + alpha * ln(1 + credit)`.

    At every step credit decays by `beta`, and each masked position's likeliest token gains
    `p ** gamma`. Kept are the ids that were the likeliest, no block by vocabulary matrix: at most
    TOP of a position, and credit counts while its token is among the TOP likeliest.
    """

    threshold: Probability = 0.9
    alpha: NonNegative = 0.7
    beta: Annotated[float, Range(0, 1, below=True)] = 0.8
    gamma: Probability = 0.2
    needs: ClassVar[frozenset[str]] = frozenset({"top"})
    monotone: ClassVar[bool] = True

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """All that reach the threshold with their credit, and the best."""
        ids, probs = proposal.top_tokens, proposal.top_probs
        assert ids is not None and probs is not None
        known, credit = self._earn(ids, probs, states)
        same = ids[..., :, None] == known[..., None, :]
        weight = (1 + torch.where(same, credit[..., None, :], 0.0).sum(dim=-1)) ** self.alpha
        # p' = p * weight / total: credit adds to a logit, so it multiplies a probability.
        total = 1 + (probs * (weight - 1)).sum(dim=-1)
        fused = probs * weight / total[..., None]
        top, place = fused.max(dim=-1)
        # A token that was drawn, or forced, stays; the likeliest one gives way to the fused one.
        likeliest = proposal.tokens == ids[..., 0]
        tokens = torch.where(likeliest, ids.gather(-1, place[..., None])[..., 0], proposal.tokens)
        drawn = torch.where(ids == proposal.tokens[..., None], weight, 0.0).sum(dim=-1)
        confidence = proposal.confidence * torch.where(drawn > 0, drawn, 1.0) / total
        confidence = torch.where(likeliest, top, confidence)
        sure = confidence >= self.threshold
        return Commit(masked & sure | best(confidence, masked), tokens)

    def _earn(
        self, ids_BWK: Tensor, probs_BWK: Tensor, states: Sequence[WindowState]
    ) -> tuple[Tensor, Tensor]:
        """Ids [B, W, S] (-1 = none) and their credit after this step."""
        room = (*ids_BWK.shape[:2], NUM_TOP)
        known = recall(states, "ids", torch.full(room, -1, device=ids_BWK.device))
        credit = recall(states, "credit", torch.zeros(room, device=ids_BWK.device)) * self.beta
        first = ids_BWK[..., :1]
        has = known == first
        # Its own place, or that of the least credit, which then starts anew.
        slot = torch.where(has.any(dim=-1), has.int().argmax(dim=-1), credit.argmin(dim=-1))
        slot = slot[..., None]
        old = torch.where(has.any(dim=-1, keepdim=True), credit.gather(-1, slot), 0.0)
        known = known.scatter(-1, slot, first)
        credit = credit.scatter(-1, slot, old + probs_BWK[..., :1] ** self.gamma)
        remember(states, "ids", known)
        remember(states, "credit", credit)
        return known, credit
