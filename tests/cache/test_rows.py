"""Which rows the cache policies run, step by step."""

from collections.abc import Callable

import numpy as np
import pytest

from dinfer.canvas import Canvas
from dinfer.engine.engine import Engine
from dinfer.registry import build
from dinfer.request import SamplingParams
from dinfer.step import CacheState, Window

from ..conftest import FAMILIES, allows, request, serve


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


EVERY, WINDOW = list(range(12)), [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("spec", "later"),
    [
        ("none", EVERY),
        ("prefix", list(range(4, 12))),
        ("dual", WINDOW),
        ("vicinity:left=1:right=2", list(range(3, 10))),
    ],
)
def test_all_when_the_window_opens_then_less(spec: str, later: list[int]) -> None:
    assert plans(spec, [[]] * 3) == [EVERY, later, later]
    if spec != "none":
        sign = "refresh=2"
        assert plans(f"{spec}:{sign}", [[]] * 4) == [EVERY, later, EVERY, later]


def test_vicinity_warms_up_and_runs_what_was_set_far_away() -> None:
    assert plans("vicinity:left=0:right=0:warmup=2", [[]] * 3) == [EVERY, EVERY, WINDOW]
    # 4 and 5 are set in the first step, outside of the second window.
    canvas = Canvas([7] * 4 + [None] * 8, 4, 12, 99, None)
    for reopen, rows in (("true", EVERY), ("false", list(range(4, 8)))):
        policy, state = build("cache", f"vicinity:left=0:right=0:reopen={reopen}"), CacheState()
        canvas.stale[policy.plan(canvas, Window(4, 6), state).index] = False
        canvas.write(np.array([4, 5]), np.array([3, 3]))
        assert list(policy.plan(canvas, Window(6, 8), state).rows) == rows


def causal(spec: str, windows: list[tuple[int, int]], writes: list[list[int]]) -> list[list[int]]:
    """Rows on a block-causal canvas, blocks of 4, of 6 given and 6 masked positions."""
    canvas = Canvas([7] * 6 + [None] * 6, 6, 12, 99, 4)
    policy, state, found = build("cache", spec), CacheState(), []
    for window, positions in zip(windows, writes, strict=True):
        plan = policy.plan(canvas, Window(*window), state)
        found.append(list(plan.rows))
        canvas.stale[plan.index] = False
        canvas.write(np.array(positions, dtype=np.int64), np.full(len(positions), 3))
    return found


def test_block_runs_the_finished_block_once_more() -> None:
    windows = [(4, 8), (4, 8), (8, 12), (8, 12)]
    assert causal("block", windows, [[6], [7], [8], []]) == [
        list(range(8)),
        [4, 5, 6, 7],
        list(range(4, 12)),
        [8, 9, 10, 11],
    ]


def test_subblock_runs_alone_once_its_first_is_set() -> None:
    windows = [(6, 8), (6, 8), (6, 8), (8, 10), (8, 10), (10, 12)]
    assert causal("subblock", windows, [[7], [6], [], [8], [9], []]) == [
        list(range(8)),
        [4, 5, 6, 7],  # 6 is still masked
        [6, 7],
        list(range(4, 12)),
        [8, 9],
        [8, 9, 10, 11],
    ]


def test_subblock_of_whole_blocks_is_block(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("sdar")
    spec = f"blockwise:length={engine.facts.block_length}:aligned=true"
    outputs = [
        serve(
            make_engine("sdar"),
            [request("a", [3] * 9, SamplingParams(max_tokens=20, cache=cache, iteration=spec))],
        )["a"]
        for cache in ("block", "subblock")
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].stats.rows_run == outputs[1].stats.rows_run


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


@pytest.mark.parametrize("cache", ["interval:prompt=9", "vicinity:left=0:right=0:reopen=false"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_that_ends_behind_a_block_reads_no_row_that_never_ran(
    make_engine: Callable[..., Engine], family: str, cache: str
) -> None:
    """Fresh pages are NaN, and NaN ends a request. Windows of 8 from position 17 on: one of them
    crosses every border of blocks, and with shifted logits its rows end at the border.
    """
    engine = make_engine(family)
    options = {"decoder": "edit", "iteration": "blockwise:length=8", "cache": cache}
    if not allows(engine, **options):
        pytest.skip("the model takes no such decoder")
    params = SamplingParams(max_tokens=36, ignore_eos=True, **options)
    output = serve(engine, [request("a", list(range(5, 22)), params)])["a"]
    assert len(output.token_ids) == 36
