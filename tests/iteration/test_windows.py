"""Iterations whose windows depend on more than where the masks are."""

from collections.abc import Callable

import pytest

from dinfer.engine.engine import Engine
from dinfer.request import CanvasEvent, Output, SamplingParams

from ..conftest import FAMILIES, decoder_for, request, serve

NEWLINE = 9


def run(engine: Engine, prompt: list[int], **options: object) -> Output:
    params = SamplingParams(ignore_eos=True, **options)  # type: ignore[arg-type]
    return serve(engine, [request("a", prompt, params)])["a"]


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
