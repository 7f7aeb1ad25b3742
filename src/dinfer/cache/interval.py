"""Prompt and answer are refreshed at intervals of their own (dLLM-Cache, arXiv 2506.06295, without
its choice of rows by the similarity of their values).
"""

from dataclasses import dataclass
from typing import ClassVar

from dinfer.canvas import Canvas
from dinfer.options import Positive
from dinfer.step import CacheState, ModelInfo, StepPlan, Window


@dataclass(frozen=True)
class Interval:
    """All rows every `prompt` steps, all from the answer on every `answer` steps, else the window
    and what was set since it last ran.
    """

    prompt: Positive = 50
    answer: Positive = 4
    exact: ClassVar[bool] = False

    def allow(self, facts: ModelInfo) -> None:
        """Any model."""

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        """By the number of steps so far."""
        reach, ran = canvas.reach(window.stop), state.reach
        start, stop = min(window.start, canvas.first_changed()), window.stop
        if state.plans % self.answer == 0:
            start, stop = min(start, canvas.answer), reach
        if state.plans % self.prompt == 0:
            start, stop = 0, reach
        if ran < reach:  # a further block, or a later horizon: rows that never ran
            start, stop = min(start, ran), reach
        state.plans += 1
        state.reach = reach
        return StepPlan(range(start, stop), reach)
