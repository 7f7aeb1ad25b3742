"""Entropy-bounded denoising of random tokens, as DiffusionGemma's released sampler does it: it ends
when the prediction is stable and confident. The bound is the EB-sampler's (arXiv 2505.24857).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dinfer.decoder.entropy import within
from dinfer.errors import RequestError
from dinfer.options import Count, NonNegative, Range
from dinfer.step import Commit, Proposal, WindowState, recall, remember


@dataclass(frozen=True)
class Renoise:
    """In each step the positions of lowest entropy show the token that was drawn for them, as long
    as their entropies (nats) add up to `bound` at most, the largest not counted; all others show
    new random tokens.

    The likeliest tokens are committed, all at once, when they were the same in the `stable` steps
    before and the mean entropy is below `entropy`, or after `steps` steps. The temperature falls
    in equal steps from `t_max` towards `t_min`.
    """

    bound: NonNegative = 0.1
    steps: Annotated[int, Range(1, 4096)] = 48
    t_min: Annotated[float, Range(0, 100, above=True)] = 0.4
    t_max: Annotated[float, Range(0, 100, above=True)] = 0.8
    stable: Count = 1
    entropy: NonNegative = 0.005
    needs: ClassVar[frozenset[str]] = frozenset({"entropy", "top", "random"})
    monotone: ClassVar[bool] = True
    drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.t_min > self.t_max:
            raise RequestError(
                f"renoise has t_min {self.t_min} and t_max {self.t_max};"
                " t_min must be at most t_max."
            )

    def temperature(self, step: int) -> float:
        """Of a window's step, counted from 0."""
        return self.t_min + (self.t_max - self.t_min) * (self.steps - step) / self.steps

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Nothing but a draft, until the last step of the window."""
        assert proposal.entropy is not None and proposal.random is not None
        assert proposal.top_tokens is not None and proposal.top_probs is not None
        likeliest = proposal.top_tokens[:, :, 0]
        before = recall(states, "likeliest", torch.full_like(likeliest, -1))
        same = ((likeliest == before) | ~masked).all(dim=1)
        streak = (recall(states, "streak", torch.zeros_like(same, dtype=torch.int64)) + 1) * same
        remember(states, "likeliest", likeliest)
        remember(states, "streak", streak)
        entropy = torch.where(masked, proposal.entropy, 0.0).sum(dim=1) / masked.sum(dim=1)
        last = [state.steps + 1 >= self.steps for state in states]
        done = (streak >= self.stable) & (entropy < self.entropy)
        done |= torch.tensor(last, device=masked.device)
        accepted = within(proposal.entropy, masked, self.bound)
        return Commit(
            masked & done[:, None],
            likeliest,
            draft=torch.where(accepted, proposal.tokens, proposal.random),
            confidence=proposal.top_probs[:, :, 0],
        )
