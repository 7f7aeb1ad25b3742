"""Which rows the cache policies run, step by step."""

from collections.abc import Callable

import numpy as np
import pytest

from dinfer.canvas import Canvas
from dinfer.engine.engine import Engine
from dinfer.registry import build
from dinfer.request import SamplingParams
from dinfer.step import CacheState, Window

from ..conftest import FAMILIES, request, serve


def plans(spec: str, writes: list[list[int]]) -> list[list[int]]:
    """Rows at each step on a canvas of 4 given and 8 masked positions, window 4..7, with the given
    positions set after each step.
    """
    canvas = Canvas([7] * 4 + [None] * 8, 4, 12, 99, None)
    policy, state, found = build("cache", spec), CacheState(), []
    for positions in writes:
        plan = policy.plan(canvas, Window(4, 8), state)
        assert plan.visible == 12
        found.append(list(plan.rows))
        canvas.stale[plan.index] = False
        canvas.write(np.array(positions, dtype=np.int64), np.full(len(positions), 3))
    return found


def test_interval() -> None:
    """Prompt every 6 steps, answer every 3, else the window."""
    every = list(range(12))
    found = plans("interval:prompt=6:answer=3", [[]] * 8)
    window, answer = [4, 5, 6, 7], list(range(4, 12))
    assert found == [every, window, window, answer, window, window, every, window]


def test_dkv_runs_masks_and_what_was_just_set() -> None:
    found = plans("dkv:refresh=5", [[5], [4, 7], [], [6], [], []])
    assert found == [
        list(range(12)),
        list(range(4, 12)),  # 5 was just set: runs once more
        [4, 6, 7, 8, 9, 10, 11],
        [6, 8, 9, 10, 11],
        [6, 8, 9, 10, 11],
        list(range(12)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_interval_of_one_is_uncached(make_engine: Callable[..., Engine], family: str) -> None:
    for spec in ("interval:prompt=1:answer=1", "dkv:refresh=1"):
        tokens = [
            serve(
                make_engine(family),
                [request("a", [3] * 9, SamplingParams(max_tokens=20, cache=cache))],
            )["a"].token_ids
            for cache in (spec, "none")
        ]
        assert tokens[0] == tokens[1]
