"""WINO (arXiv 2507.18578), wide in, narrow out: set many tokens at a low threshold, take back what
the others then contradict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.options import Positive, Probability
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

    threshold: Probability = 0.6
    back: Probability = 0.9
    share: Probability = 0.7
    least: Positive = 5
    most: Positive = 20
    needs: ClassVar[frozenset[str]] = frozenset({"shadow"})
    monotone: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise RequestError(
                f"wino has least {self.least} and most {self.most}; least must be at most most."
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
