"""LocalLeap (arXiv 2510.07081): near a very sure position, a lower threshold is enough."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import max_pool1d

from dinfer.errors import RequestError
from dinfer.step import Commit, Proposal, WindowState, best


@dataclass(frozen=True)
class LocalLeap:
    """Commits every masked position of confidence `anchor` or more, those within `radius` of such
    a one that reach `threshold`, and the best in any case.
    """

    anchor: float = 0.9
    threshold: float = 0.75
    radius: int = 4
    needs: ClassVar[frozenset[str]] = frozenset()
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= self.anchor <= 1.0:
            raise RequestError(
                f"localleap has threshold {self.threshold} and anchor {self.anchor};"
                " 0 <= threshold <= anchor <= 1 is needed."
            )
        if self.radius < 0:
            raise RequestError(f"localleap radius is {self.radius}; it must be 0 or more.")

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Anchors and their sure neighbours."""
        confidence = proposal.confidence
        anchors = masked & (confidence >= self.anchor)
        near = max_pool1d(anchors.float(), 2 * self.radius + 1, stride=1, padding=self.radius) > 0
        leaps = masked & near & (confidence >= self.threshold)
        return Commit(leaps | best(confidence, masked), proposal.tokens)
