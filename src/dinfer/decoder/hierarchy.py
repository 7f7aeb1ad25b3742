"""dInfer's hierarchical decoding (arXiv 2510.08666): each run of masks is split at its surest
position, so that neighbours, which depend on each other, are not set at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.options import Probability
from dinfer.step import Commit, Confidence, Places, Proposal, WindowState, by_rule


@dataclass(frozen=True)
class Hierarchy:
    """Commits the best position of every run of adjacent masks if its confidence exceeds `low`,
    every position above `threshold`, and the best of all in any case.
    """

    threshold: Probability = 0.9
    low: Probability = 0.4
    needs: ClassVar[frozenset[str]] = frozenset()
    monotone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.threshold <= 1.0:
            raise RequestError(
                f"hierarchy has low {self.low} and threshold {self.threshold};"
                " 0 <= low <= threshold <= 1 is needed."
            )

    def rule(self, places: Places, confidence: Confidence) -> Places:
        """All that are sure, the best of each run, the best of all."""
        chosen = confidence > np.float32(self.threshold)
        cuts = (np.diff(places) > 1).nonzero()[0] + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(places)]):
            best = start + confidence[start:stop].argmax()
            chosen[best] |= confidence[best] > np.float32(self.low)
        chosen[confidence.argmax()] = True
        return chosen.nonzero()[0]

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """What the rule says."""
        return by_rule(self.rule, proposal, masked)
