"""Delayed caching (dKV-Cache, arXiv 2505.15781, its decode variant): a token's keys and values are
kept from the step after it was set.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dinfer.canvas import Canvas
from dinfer.options import Count
from dinfer.step import CacheState, ModelInfo, StepPlan, Window


@dataclass(frozen=True)
class Dkv:
    """Masked rows always run, set ones once more after they were set, all every `refresh` steps (0
    = never).
    """

    refresh: Count = 8
    exact: ClassVar[bool] = False

    def allow(self, facts: ModelInfo) -> None:
        """Any model."""

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """What is masked, or has changed since it last ran, or never ran."""
        reach = canvas.reach(window.stop)
        whole = self.refresh > 0 and state.plans % self.refresh == 0
        state.plans += 1
        if whole:
            return StepPlan(range(reach), reach)
        rows = canvas.masked[:reach] | canvas.stale[:reach]
        if canvas.revisable:
            # What may still be written over needs a proposal too.
            rows[window.start : window.stop] = True
        return StepPlan(np.flatnonzero(rows), reach)
