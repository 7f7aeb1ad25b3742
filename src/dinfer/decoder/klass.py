"""KLASS (arXiv 2511.05664): a token is taken when it is sure and its distribution has come to rest.

B windows, W positions, K likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.options import Count, NonNegative, Probability
from dinfer.step import Commit, Proposal, WindowState, best, recall, remember


@dataclass(frozen=True)
class Klass:
    """Commits positions of confidence above `threshold` whose distribution moved by less than
    `divergence` nats (KL to the step before) in each of the last `steps` steps, and the best in
    any case.

    The likeliest tokens of the last step are remembered, no row of the vocabulary: the divergence
    is that of the distributions over the tokens among the likeliest of both steps, with all others
    as one.
    """

    threshold: Probability = 0.9
    divergence: NonNegative = 0.01
    steps: Count = 2
    needs: ClassVar[frozenset[str]] = frozenset({"top"})
    monotone: ClassVar[bool] = True

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """At rest and sure, or the best."""
        ids, probs = proposal.top_tokens, proposal.top_probs
        assert ids is not None and probs is not None
        old_ids = recall(states, "ids", torch.full_like(ids, -1))
        old_probs = recall(states, "probs", torch.zeros_like(probs))
        calm = divergence(ids, probs, old_ids, old_probs) < self.divergence
        rest = recall(states, "rest", torch.zeros_like(masked, dtype=torch.int64))
        rest = torch.where(calm, rest + 1, 0)
        for name, value in (("ids", ids), ("probs", probs), ("rest", rest)):
            remember(states, name, value)
        steady = (rest >= self.steps) & (proposal.confidence > self.threshold)
        return Commit(masked & steady | best(proposal.confidence, masked), proposal.tokens)


def divergence(ids_BWK: Tensor, probs_BWK: Tensor, old_ids_BWK: Tensor, old_BWK: Tensor) -> Tensor:
    """KL(now, before) [B, W] in nats over the ids in both lists and one class for all others; a
    lower bound of the divergence over the vocabulary. Infinite where nothing was before (ids -1).
    """
    same = ids_BWK[..., :, None] == old_ids_BWK[..., None, :]
    shared = same.any(dim=-1)
    now = torch.where(shared, probs_BWK, 0.0)
    before = torch.where(same, old_BWK[..., None, :], 0.0).sum(dim=-1)
    now = torch.cat((now, 1 - now.sum(dim=-1, keepdim=True)), dim=-1).clamp_min(0.0)
    before = torch.cat((before, 1 - before.sum(dim=-1, keepdim=True)), dim=-1)
    # Both are 0 in float32 where the likeliest tokens hold all of the probability.
    before = before.clamp_min(1e-9)
    terms = torch.where(now > 0, now * (now.clamp_min(1e-38).log() - before.log()), 0.0)
    return torch.where((old_ids_BWK < 0).all(dim=-1), torch.inf, terms.sum(dim=-1))
