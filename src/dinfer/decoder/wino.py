"""WINO (arXiv 2507.18578), wide in, narrow out: set many tokens at a low threshold, take back what
the others then contradict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.step import Commit, Proposal, WindowState, best, ranks, recall, remember


@dataclass(frozen=True)
class Wino:
    """Commits positions of confidence above `threshold`, at most `incref` of those that are masked
    (but `least` may be, and never more than `most`), and the best in any case.

    Takes back set tokens whose probability is now below `back`, the least likely first, at most
    one less than the step before committed; so a window always comes to its end. The probability
    is that of a shadow row: a mask in the token's place, which sees all but the token and is seen
    by nobody. (The paper runs a shadow of the whole block; only set positions need one.)
    """

    threshold: float = 0.6
    back: float = 0.9
    share: float = 0.7
    least: int = 5
    most: int = 20
    needs: ClassVar[frozenset[str]] = frozenset({"shadow"})
    monotone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (0.0 <= self.threshold <= 1.0 and 0.0 <= self.back <= 1.0):
            raise RequestError(
                f"wino has threshold {self.threshold} and back {self.back};"
                " both must lie between 0 and 1."
            )
        if not 0.0 <= self.share <= 1.0 or not 1 <= self.least <= self.most:
            raise RequestError(
                f"wino has share {self.share}, least {self.least} and most {self.most};"
                " 0 <= share <= 1 and 1 <= least <= most are needed."
            )

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Wide in and narrow out, both from the same proposals."""
        assert proposal.kept is not None and proposal.editable is not None
        count = masked.sum(dim=1, keepdim=True)
        room = (count * self.share).long().clamp(self.least, self.most)
        sure = masked & (proposal.confidence > self.threshold)
        within = ranks(proposal.confidence, masked) < room
        mask = sure & within | best(proposal.confidence, masked)
        doubtful = proposal.editable & (proposal.kept < self.back)
        before = recall(states, "committed", torch.ones_like(count[:, 0]))
        back = doubtful & (ranks(-proposal.kept, doubtful) < before[:, None] - 1)
        remember(states, "committed", mask.sum(dim=1))
        return Commit(mask, proposal.tokens, back=back)
