"""LLaDA2.1's joint threshold (arXiv 2602.08676): masked positions are set and set ones overwritten
in the same step. Made for models trained to edit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.options import Probability, Rounds
from dinfer.step import Commit, Proposal, WindowState, best, recall, remember


@dataclass(frozen=True)
class Edit:
    """Commits masked positions of confidence above `threshold`, the best in any case, and writes
    over set ones where another token has a probability above `edit`.

    When nothing is masked any more, up to `rounds` further steps edit until nothing changes. An
    `edit` of 1 never edits.
    """

    threshold: Probability = 0.95
    edit: Probability = 0.9
    rounds: Rounds = 16
    needs: ClassVar[frozenset[str]] = frozenset()
    monotone: ClassVar[bool] = False

    def commit(self, proposal: Proposal, masked: Tensor, states: Sequence[WindowState]) -> Commit:
        """Sets and edits; keeps the window open while edits go on."""
        assert proposal.held is not None and proposal.editable is not None
        sure = masked & (proposal.confidence > self.threshold)
        fresh = sure | best(proposal.confidence, masked)
        differs = proposal.editable & (proposal.tokens != proposal.held)
        edits = differs & (proposal.confidence > self.edit)
        rounds = self.rounds if self.edit < 1 else 0
        full = ~masked.any(dim=1)
        used = recall(states, "rounds", torch.zeros_like(full, dtype=torch.int64)) + full
        remember(states, "rounds", used)
        # With masks left the window stays open by itself. Just filled, or just edited: look once
        # more, as long as rounds last.
        filled = ~(masked & ~fresh).any(dim=1)
        going = filled & (used < rounds) & (~full | edits.any(dim=1))
        return Commit(fresh | edits, proposal.tokens, open=going)
