"""Answers whose length grows (DAEDAL)."""

import math
from collections.abc import Callable

import pytest

from dinfer.engine.engine import Engine
from dinfer.errors import RequestError
from dinfer.registry import build, names
from dinfer.request import CanvasEvent, Output, SamplingParams, TextEvent

from ..conftest import EOS, FAMILIES, allows, decoder_for, request, serve

SURE = 12.0
"""A logit among 15 tokens that gives a probability of 0.9999."""


def run(engine: Engine, **options: object) -> Output:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return serve(engine, [request("a", [3, 4, 5], params)])["a"]


def script(engine: Engine, said: dict[int, tuple[int, float]]) -> None:
    engine.model.logits.zero_()  # type: ignore[operator, union-attr]
    for place, (token, logit) in said.items():
        engine.model.logits[place, token] = logit  # type: ignore[operator, index]


def test_the_rule_step_by_step(scripted: Callable[..., Engine]) -> None:
    """Prompt 0..1, four masks at first, blocks of 4, growth by 2, certainty over 2 positions.

    Step 1: no end is proposed, so two masks are added. Step 2: an end at 7, so the certainty is
    0.5: enough to begin, not to stop growing. 2 and 4 are set; 3, with 1 / 15, gives way to two
    masks, so what was set at 4 is at 5 now. Steps 3 and 4: the block 2..5, then 6..8.
    """
    engine = scripted({})
    options = "daedal:length=4:initial=4:by=2:tail=2:begin_at=0.4"
    params = SamplingParams(max_tokens=24, iteration=options, decoder="threshold")
    engine.add(request("a", [1, 1], params))
    seen: list[tuple[list[int], list[int], list[int]]] = []

    def step() -> None:
        events = engine.step()
        seen.extend(
            (e.positions, e.token_ids, e.back) for e in events if isinstance(e, CanvasEvent)
        )

    step()
    script(engine, {2: (5, SURE), 4: (6, SURE), 5: (7, 3.0), 7: (EOS, SURE)})
    step()
    assert seen == [([], [], []), ([0, 2], [5, 6], []), ([3], [6], [2])]
    sure = {3: 8, 4: 9, 6: 7, 7: 3, 8: EOS}
    script(engine, {place: (token, SURE) for place, token in sure.items()})
    (output,) = serve(engine, []).values()
    assert output.token_ids == [5, 8, 9, 6, 7, 3]
    assert (output.finish_reason, output.stats.forward_passes) == ("stop", 4)
    assert engine.model.rows == [list(range(n)) for n in (6, 8, 9, 9)]


def test_max_tokens_is_the_ceiling(scripted: Callable[..., Engine]) -> None:
    """Never an end: 4, 7, then 9 of 9 masks, and each of these steps sets nothing."""
    engine = scripted(dict.fromkeys(range(40), (5, SURE)))
    options = "daedal:length=4:initial=4:by=3"
    out = run(engine, max_tokens=9, iteration=options, decoder="threshold")
    assert [len(rows) for rows in engine.model.rows[:3]] == [7, 10, 12]
    assert out.token_ids == [5] * 9
    assert (out.finish_reason, out.stats.forward_passes) == ("length", 2 + 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_growth_it_is_blockwise(make_engine: Callable[..., Engine], family: str) -> None:
    """Growth is off where the canvas begins whole, where no end of text ends the answer, and where
    attention is block-causal.
    """
    full = make_engine(family).facts.block_length is None
    decoder = decoder_for(make_engine(family), "threshold:threshold=0.4")
    for spec, ignore in (("initial=0", False), ("initial=8", full)):
        options = {"max_tokens": 30, "decoder": decoder, "ignore_eos": ignore}
        plain = run(make_engine(family), iteration="blockwise:length=8", **options)
        found = run(make_engine(family), iteration=f"daedal:length=8:{spec}", **options)
        assert found.token_ids == plain.token_ids
        assert found.stats.rows_run == plain.stats.rows_run


WHOLE = ["prefix:refresh=1", "dual:refresh=1", "interval:prompt=1:answer=1", "dkv:refresh=1"]


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("cache", [*names("cache"), *WHOLE])
@pytest.mark.parametrize("options", ["", ":begin_at=0:low=0.6"])
def test_under_every_cache(
    make_engine: Callable[..., Engine], family: str, cache: str, options: str
) -> None:
    """No row is read that never ran (it would be NaN); what runs all rows gives the same tokens."""
    if not allows(make_engine(family), cache=cache):
        return
    spec = f"daedal:length=8:initial=9:by=4{options}"

    def answer(cache: str) -> Output:
        decoder = "threshold:threshold=0.6"
        return run(make_engine(family), max_tokens=40, iteration=spec, cache=cache, decoder=decoder)

    found = answer(cache)
    assert all(0 <= token < 320 for token in found.token_ids)
    if cache in ("none", *WHOLE):
        plain = answer("none")
        assert found.token_ids == plain.token_ids
        assert plain.stats.tokens > 9 and plain.stats.rows_run < 43 * plain.stats.forward_passes


@pytest.mark.parametrize(
    "decoder", ["threshold:threshold=0.5", "remdm:eta=0.5", "edit:threshold=0.5:edit=0.1:rounds=3"]
)
def test_events_make_up_an_answer_that_moved(
    make_engine: Callable[..., Engine], decoder: str
) -> None:
    engine = make_engine("llada")
    spec = "daedal:length=8:initial=9:by=4:begin_at=0:low=0.6"
    params = SamplingParams(max_tokens=40, iteration=spec, decoder=decoder, logprobs=True)
    engine.add(request("a", [3, 4], params))
    shown: dict[int, tuple[int, float]] = {}
    moves, output = 0, None
    while engine.busy:
        step = engine.step()
        events = [e for e in step if isinstance(e, CanvasEvent)]
        moves += len(events) - 1
        for event in events:
            for place in event.back:
                del shown[place]
            pairs = zip(event.token_ids, event.confidence, strict=True)
            shown |= dict(zip(event.positions, pairs, strict=True))
        output = next((e.output for e in step if isinstance(e, TextEvent) and e.output), output)
    assert output is not None and output.logprobs is not None and moves > 0
    assert output.token_ids == [shown[place][0] for place in range(len(output.token_ids))]
    for place, logprob in enumerate(output.logprobs):
        assert math.exp(logprob) == pytest.approx(shown[place][1], rel=1e-5)


@pytest.mark.parametrize("spec", ["length=-1", "by=0", "low=1.5", "begin_at=nan", "tail=0"])
def test_options_out_of_range_are_named(spec: str) -> None:
    with pytest.raises(RequestError, match=spec.split("=")[0]):
        build("iteration", f"daedal:{spec}")
