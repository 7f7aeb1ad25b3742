"""SlowFast sampling (arXiv 2506.10848): explore carefully until the end of the sure part is known,
then fill that part fast.

B windows, W positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.options import Positive, Probability
from dinfer.step import Commit, Proposal, WindowState, best, recall, remember


@dataclass(frozen=True)
class SlowFast:
    """Two phases in turn, both of which commit all positions of confidence `threshold` or more,
    and the best in any case.

    Exploring, any masked position may be set. Its end is estimated as the farthest masked position
    of confidence `explore` or more; when the standard deviation of the last two estimates is below
    1, or after `steps` steps, that position ends a segment. Then only the segment is filled; when
    it is full, exploring starts again. (The paper also reuses the logits behind the segment, which
    here is the cache's matter.)
    """

    threshold: Probability = 0.9
    explore: Probability = 0.3
    steps: Positive = 6
    needs: ClassVar[frozenset[str]] = frozenset()
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.explore > self.threshold:
            raise RequestError(
                f"slowfast has explore {self.explore} and threshold {self.threshold};"
                " explore must be at most the threshold."
            )

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """The sure ones of the segment, or of the window while there is none."""
        place = torch.arange(masked.shape[1], device=masked.device).expand(masked.shape)
        none = torch.full((len(masked),), -1, device=masked.device)
        end = recall(states, "end", none)
        inside = masked & (place <= end[:, None])
        exploring = ~inside.any(dim=1)
        eligible = torch.where(exploring[:, None], masked, inside)
        sure = eligible & (proposal.confidence >= self.threshold)
        self._explore(proposal.confidence, masked, place, exploring, end, states)
        return Commit(sure | best(proposal.confidence, eligible), proposal.tokens)

    def _explore(
        self,
        confidence: Tensor,
        masked: Tensor,
        place: Tensor,
        exploring: Tensor,
        end: Tensor,
        states: Sequence[WindowState],
    ) -> None:
        """Estimates the end of the sure part, and closes the segment when the estimate stands."""
        last = recall(states, "estimate", torch.full_like(end, -1))
        count = torch.where(exploring, recall(states, "count", torch.zeros_like(end)) + 1, 0)
        far = torch.where(masked & (confidence >= self.explore), place, -1).amax(dim=1)
        # Nothing that sure: the leftmost mask is the whole segment.
        first = torch.where(masked, place, masked.shape[1]).amin(dim=1)
        estimate = torch.where(far >= 0, far, first)
        # The standard deviation of two numbers is half their distance.
        stands = (last >= 0) & ((estimate - last).abs() < 2) | (count >= self.steps)
        remember(states, "end", torch.where(exploring, torch.where(stands, estimate, -1), end))
        remember(states, "estimate", torch.where(exploring & ~stands, estimate, -1))
        remember(states, "count", torch.where(stands, 0, count))
