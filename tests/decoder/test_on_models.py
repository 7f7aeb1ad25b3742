"""Decoders on the tiny models: what reduces to what, what is never touched, what is exact."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from dinfer.engine.engine import Engine
from dinfer.errors import RequestError
from dinfer.registry import build
from dinfer.request import CanvasEvent, Output, SamplingParams, TextEvent

from ..conftest import FAMILIES, allows, request, serve

PROMPTS = [[5, 9, 200, 31, 8], [], list(range(40, 57)), [7] * 8]

REDUCED = {
    "credit:threshold=0.4:alpha=0": "threshold:threshold=0.4",
    "klass:threshold=0.4:steps=0": "threshold:threshold=0.4:strict=true",
    "localleap:anchor=0.4:threshold=0.4:radius=0": "threshold:threshold=0.4",
    "hierarchy:threshold=0.4:low=0.4": "threshold:threshold=0.4:strict=true",
    "slowfast:threshold=0.4:explore=0": "threshold:threshold=0.4",
    "wino:threshold=0.4:share=1:most=99:back=0": "threshold:threshold=0.4:strict=true",
    "edit:threshold=0.4:edit=1": "threshold:threshold=0.4:strict=true",
    "remdm:steps=5:eta=0": "fixed:steps=5",
    "dream:ranking=maskgit:filtered=false": "fixed",
    "dream:ranking=maskgit": "fixed",
    "factor:factor=0": "fixed",
    "threshold:threshold=1": "fixed",
    "fixed:steps=99": "fixed",
    "entropy:bound=0": "dream:ranking=entropy",
    "entropy_threshold:threshold=0": "dream:ranking=entropy:filtered=false",
}


def run(engine: Engine, **options: object) -> dict[str, Output]:
    params = SamplingParams(max_tokens=21, ignore_eos=True, **options)  # type: ignore[arg-type]
    return serve(engine, [request(str(i), p, params) for i, p in enumerate(PROMPTS)])


@pytest.mark.parametrize("decoder", REDUCED)
def test_reduces_to_the_plain_one(make_engine: Callable[..., Engine], decoder: str) -> None:
    # Of the tiny models this one is never certain, so that no entropy is 0.
    found = run(make_engine("llada"), decoder=decoder)
    plain = run(make_engine("llada"), decoder=REDUCED[decoder])
    for name, output in plain.items():
        assert found[name].token_ids == output.token_ids
        assert found[name].stats.forward_passes == output.stats.forward_passes


CHANGING = [
    "wino:threshold=0.1:back=0.5",
    "remdm:steps=12:eta=0.5",
    "edit:threshold=0.2:edit=0.1:rounds=4",
]


@pytest.mark.parametrize("decoder", CHANGING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_block_cache_is_exact_while_tokens_change(
    make_engine: Callable[..., Engine], decoder: str, temperature: float
) -> None:
    runs = [
        run(make_engine("sdar"), decoder=decoder, temperature=temperature, cache=cache)
        for cache in ("none", "block")
    ]
    assert [o.token_ids for o in runs[0].values()] == [o.token_ids for o in runs[1].values()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", CHANGING)
def test_given_text_stays_and_events_make_up_the_answer(
    make_engine: Callable[..., Engine], family: str, decoder: str
) -> None:
    """Fixed text between and behind the blanks is never touched; what is taken back or written
    over shows in the events.
    """
    engine = make_engine(family)
    if not allows(engine, decoder=decoder):
        shifted = engine.facts.shift and decoder.startswith("wino")
        assert shifted or engine.facts.mask_id is None
        return
    params = SamplingParams(decoder=decoder, temperature=0.7, seed=3)
    canvas = (1, 2, 3, *[None] * 9, 50, 51, None, 52, *[None] * 6, 60, 61)
    engine.add(replace(request("a", [], params), canvas=canvas, answer=3, stops=False))
    shown = {place: token for place, token in enumerate(canvas[3:]) if token is not None}
    fixed, changes, output = dict(shown), 0, None
    while engine.busy:
        for event in engine.step():
            if isinstance(event, CanvasEvent):
                assert not fixed.keys() & {*event.positions, *event.back}
                changes += len(event.back) + len(shown.keys() & {*event.positions})
                for place in event.back:
                    del shown[place]
                shown |= dict(zip(event.positions, event.token_ids, strict=True))
            elif isinstance(event, TextEvent) and event.output:
                output = event.output
    assert output is not None
    assert output.token_ids == [shown[place] for place in range(len(canvas) - 3)]
    assert changes > 0


@pytest.mark.parametrize(
    "spec",
    [
        "entropy:bound=-1",
        "entropy_threshold:threshold=-0.1",
        "entropy_threshold:slope=nan",
        "hierarchy:low=0.9:threshold=0.5",
        "credit:beta=1",
        "credit:threshold=1.1",
        "klass:steps=-1",
        "klass:threshold=2",
        "localleap:radius=-1",
        "localleap:threshold=0.95",
        "slowfast:steps=0",
        "slowfast:explore=0.95",
        "dream:ranking=best",
        "dream:eps=0",
        "wino:least=9:most=3",
        "wino:back=1.5",
        "remdm:eta=2",
        "edit:rounds=-1",
        "edit:edit=nan",
        "renoise:bound=-1",
        "renoise:steps=0",
        "renoise:t_min=0",
        "renoise:t_max=0.1",
    ],
)
def test_options_out_of_range_are_named(spec: str) -> None:
    name, option = spec.split(":")[0], spec.split(":")[1].split("=")[0]
    with pytest.raises(RequestError, match=f"{name}.*{option}"):
        build("decoder", spec)


def test_an_end_of_text_that_is_taken_back_ends_nothing(scripted: Callable[..., Engine]) -> None:
    """EOS at place 2 is set among the first, then so little likely that wino takes it back; what
    is likely in its place then is what the answer gets.
    """
    engine = scripted({0: (5, 1.0), 1: (6, 2.0), 2: (14, 9.0), 3: (7, 9.0), 4: (8, 9.0)})
    engine.add(request("a", [], SamplingParams(max_tokens=5, decoder="wino:share=0:least=3")))
    engine.step()
    sequence = engine.scheduler.running[0]
    assert sequence.canvas.limit == 3
    engine.model.logits[2, 14], engine.model.logits[2, 9] = 0.0, 12.0  # type: ignore[operator, index]
    (output,) = serve(engine, []).values()
    assert output.token_ids == [5, 6, 9, 7, 8]
    assert output.finish_reason == "length"


def test_edits_settle_only_when_the_window_closes(scripted: Callable[..., Engine]) -> None:
    """All eight places are sure at once; the window stays open for a look, in which place 3
    changes, and one more look finds nothing.
    """
    engine = scripted({p: (p + 1, 12.0) for p in range(8)})
    engine.add(request("a", [], SamplingParams(max_tokens=8, decoder="edit", ignore_eos=True)))
    assert [type(e) for e in engine.step()] == [CanvasEvent]
    engine.model.logits[3, 9] = 15.0  # type: ignore[operator, index]
    (event,) = engine.step()
    assert isinstance(event, CanvasEvent) and (event.positions, event.token_ids) == ([3], [9])
    event, last = engine.step()
    assert isinstance(event, CanvasEvent) and event.positions == []
    assert isinstance(last, TextEvent) and last.output is not None
    assert last.output.token_ids == [1, 2, 3, 9, 5, 6, 7, 8]
    assert last.output.stats.forward_passes == 3
