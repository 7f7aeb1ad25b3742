"""LocalLeap (arXiv 2510.07081): near a very sure position, a lower threshold is enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor
from torch.nn.functional import max_pool1d

from dinfer.errors import RequestError
from dinfer.options import Probability, Range
from dinfer.step import Commit, Proposal, WindowState, best


@dataclass(frozen=True)
class LocalLeap:
    """Commits every masked position of confidence `anchor` or more, those within `radius` of such
    a one that reach `threshold`, and the best in any case.
    """

    anchor: Probability = 0.9
    threshold: Probability = 0.75
    radius: Annotated[int, Range(0, 4096)] = 4
    needs: ClassVar[frozenset[str]] = frozenset()
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.threshold > self.anchor:
            raise RequestError(
                f"localleap has threshold {self.threshold} and anchor {self.anchor};"
                " the threshold must be at most the anchor."
            )

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Anchors and their sure neighbours."""
        confidence = proposal.confidence
        anchors = masked & (confidence >= self.anchor)
        radius = min(self.radius, masked.shape[1])
        near = max_pool1d(anchors.float(), 2 * radius + 1, stride=1, padding=radius) > 0
        leaps = masked & near & (confidence >= self.threshold)
        return Commit(leaps | best(confidence, masked), proposal.tokens)
