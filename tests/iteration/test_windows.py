"""Iterations whose windows depend on more than where the masks are."""

from collections.abc import Callable

import numpy as np
import pytest

from dinfer.canvas import Canvas
from dinfer.engine.engine import Engine
from dinfer.registry import build
from dinfer.request import CanvasEvent, Output, SamplingParams

from ..conftest import FAMILIES, decoder_for, request, serve

NEWLINE = 9


def run(engine: Engine, prompt: list[int], **options: object) -> Output:
    params = SamplingParams(ignore_eos=True, **options)  # type: ignore[arg-type]
    return serve(engine, [request("a", prompt, params)])["a"]


def windows(spec: str, order: list[int]) -> list[tuple[int, int]]:
    """The windows of 3 given and 10 masked positions that are set in this order."""
    canvas, iteration = Canvas([7] * 3 + [None] * 10, 3, 13, 99, None), build("iteration", spec)
    found = []
    for place in order:
        window = iteration.window(canvas)
        found.append((window.start, window.stop))
        canvas.write(np.array([place]), np.array([5]))
    return found


def test_windows_by_hand() -> None:
    """Blocks from the answer or from 0; a slide of two when two are set at the left; sub-blocks of
    four in blocks of eight, with the first of a block by itself.
    """
    order = [4, 3, 6, 5, 8, 7]
    blocks = [(3, 7)] * 4 + [(7, 11)] * 2
    assert windows("blockwise:length=4", order) == blocks
    aligned = [(0, 4), (0, 4), (4, 8), (4, 8), (4, 8), (4, 8)]
    assert windows("blockwise:length=4:aligned=true", order) == aligned
    slides = [(3, 8), (3, 8), (5, 10), (5, 10), (7, 12), (7, 12)]
    assert windows("sliding:length=5:stride=2", order) == slides
    subs = [(0, 4), (4, 8), (4, 8), (4, 8), (4, 8), (8, 9), (8, 12)]
    assert windows("subblock:block=8:length=4", [3, 4, 6, 5, 7, 8, 9]) == subs
    assert windows("subblock:block=8:length=4:lead=false", order) == aligned


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_a_stride_of_the_whole_is_blockwise(
    make_engine: Callable[..., Engine], family: str
) -> None:
    options = {"max_tokens": 30, "decoder": "threshold:threshold=0.4"}
    pairs = [
        ("sliding:length=8:stride=8", "blockwise:length=8"),
        ("subblock:block=8:length=8:lead=false", "blockwise:length=8:aligned=true"),
    ]
    for spec, plain in pairs:
        found, wanted = (
            run(make_engine(family), [3, 4, 5], iteration=i, **options) for i in (spec, plain)
        )
        assert found.token_ids == wanted.token_ids
        assert found.stats.rows_run == wanted.stats.rows_run


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["none", "prefix", "vicinity:reopen=false", "interval", "dkv"])
def test_pruned_with_all_in_sight_is_blockwise(
    make_engine: Callable[..., Engine], family: str, cache: str
) -> None:
    decoder = decoder_for(make_engine(family), "threshold:threshold=0.4")
    options = {"max_tokens": 40, "cache": cache, "decoder": decoder}
    plain = run(make_engine(family), [3, 4, 5], iteration="blockwise:length=8", **options)
    wide = run(make_engine(family), [3, 4, 5], iteration="pruned:length=8:ahead=9", **options)
    assert wide.token_ids == plain.token_ids
    assert wide.stats.rows_run == plain.stats.rows_run
    near = run(make_engine(family), [3, 4, 5], iteration="pruned:length=8:ahead=1", **options)
    assert len(near.token_ids) == 40
    # Block-causal models never look ahead.
    if cache in ("none", "prefix") and make_engine(family).facts.block_length is None:
        assert near.stats.rows_run < plain.stats.rows_run


def test_pruned_runs_the_nearest_and_the_last(scripted: Callable[..., Engine]) -> None:
    """Prompt 2, 40 tokens, blocks of 8, one ahead: the window 2..9, the block 10..17, and 41."""
    engine = scripted(dict.fromkeys(range(60), (5, 1.0)))
    run(engine, [1, 1], max_tokens=40, iteration="pruned:length=8:ahead=1")
    assert engine.model.rows[0] == [*range(18), 41]
    assert engine.model.rows[8] == [*range(26), 41]
    assert engine.model.rows[-1] == list(range(42))


def test_pruned_without_the_last(scripted: Callable[..., Engine]) -> None:
    """Prompt 2, 40 tokens, windows of 8, one ahead; the stored rows are kept, and what comes into
    sight runs when the next window opens, with what was set last.
    """
    engine = scripted(dict.fromkeys(range(60), (5, 1.0)))
    options = {"cache": "vicinity:left=0:right=0:reopen=false", "decoder": "fixed:steps=2"}
    run(engine, [1, 1], max_tokens=40, iteration="pruned:length=8:ahead=1:last=false", **options)
    assert engine.model.rows[0] == list(range(18))
    assert engine.model.rows[1] == list(range(2, 10))
    assert engine.model.rows[2][-1] == 25 and engine.model.rows[2][0] in range(2, 10)
    assert engine.model.rows[3] == list(range(10, 18))
    # Nothing is left to come into sight behind 42.
    assert max(map(max, engine.model.rows)) == 41


def test_fixed_text_behind_the_blanks_stays_in_sight(scripted: Callable[..., Engine]) -> None:
    from dataclasses import replace

    engine = scripted(dict.fromkeys(range(60), (5, 1.0)))
    params = SamplingParams(iteration="pruned:length=4:ahead=0")
    one = replace(request("a", [], params), canvas=(*[None] * 12, 7, 7), stops=False)
    assert serve(engine, [one])["a"].token_ids == [5] * 12 + [7, 7]
    assert all(rows == list(range(14)) for rows in engine.model.rows)


@pytest.mark.parametrize(("sure", "ends"), [(5.0, [7, 15, 23]), (0.5, [8, 16, 24])])
def test_adablock_ends_with_the_line(
    scripted: Callable[..., Engine], sure: float, ends: list[int]
) -> None:
    """40 tokens, so 10 are looked at; the newline at 6 and later ones end a block where they are
    likely (e^5 to 14 others), else 8 positions do. One token a step, the surest first.
    """
    script = dict.fromkeys(range(40), (5, 1.0))
    script |= dict.fromkeys((6, 14, 22), (NEWLINE, sure))
    engine = scripted(script)
    options = f"adablock:length=8:delimiter={NEWLINE}"
    engine.add(request("a", [], SamplingParams(max_tokens=40, iteration=options)))
    filled: list[int] = []
    while engine.busy:
        for event in engine.step():
            filled += event.positions if isinstance(event, CanvasEvent) else []
    for end in ends:
        assert sorted(filled[:end]) == list(range(end))


@pytest.mark.parametrize("family", FAMILIES)
def test_adablock_opens_each_block_once(make_engine: Callable[..., Engine], family: str) -> None:
    """With no likely delimiter it is blockwise, and narrowing costs no second full run."""
    options = {"max_tokens": 40, "cache": "dual", "decoder": "threshold:threshold=0.4"}
    plain = run(make_engine("llada"), [3, 4, 5], iteration="blockwise:length=8", **options)
    found = run(
        make_engine("llada"), [3, 4, 5], iteration="adablock:length=8:threshold=1", **options
    )
    assert found.token_ids == plain.token_ids
    assert found.stats.rows_run == plain.stats.rows_run
    assert len(run(make_engine(family), [3], iteration="adablock", max_tokens=40).token_ids) == 40
