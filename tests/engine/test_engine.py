"""The engine on a model whose logits are scripted, so that every right answer was worked out by
hand.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from dinfer.engine.engine import Engine
from dinfer.errors import RequestError
from dinfer.request import CanvasEvent, Output, SamplingParams, TextEvent, repetition

from ..conftest import EOS, MASK, request, serve


def run(engine: Engine, prompt: list[int], **options: object) -> Output:
    return serve(engine, [request("a", prompt, SamplingParams(**options))])["a"]  # type: ignore[arg-type]


def test_order_of_confidence(scripted: Callable[..., Engine]) -> None:
    """Positions 2..5 with logits 1, 4, 2, 3: set in the order 3, 5, 4, 2, one a forward."""
    engine = scripted({2: (5, 1.0), 3: (6, 4.0), 4: (7, 2.0), 5: (8, 3.0)})
    engine.add(request("a", [1, 2], SamplingParams(max_tokens=4)))
    order = []
    while engine.busy:
        order += [e.positions for e in engine.step() if isinstance(e, CanvasEvent)]
    assert order == [[1], [3], [2], [0]]


def test_confidence_is_the_probability_under_the_raw_logits(
    scripted: Callable[..., Engine],
) -> None:
    """One logit of ln 14 among 15 tokens (the mask token has none): 14 / (14 + 14) = 0.5."""
    engine = scripted({0: (5, 2.6390573296152584)})
    engine.add(request("a", [], SamplingParams(max_tokens=1, temperature=3.0, seed=5)))
    (event,) = [e for e in engine.step() if isinstance(e, CanvasEvent)]
    expected = 0.5 if event.token_ids == [5] else 0.5 / 14
    assert event.confidence[0] == pytest.approx(expected, rel=1e-5)


def test_threshold_takes_all_that_are_sure(scripted: Callable[..., Engine]) -> None:
    sure = 12.0
    engine = scripted({0: (5, sure), 1: (6, 1.0), 2: (7, sure), 3: (8, 0.5)})
    out = run(engine, [], max_tokens=4, decoder="threshold:threshold=0.9")
    assert out.token_ids == [5, 6, 7, 8]
    assert out.stats.forward_passes == 3


def test_end_of_text_ends_the_answer(scripted: Callable[..., Engine]) -> None:
    """EOS at place 2 is the surest: what lies behind it is never decided, what is before it is."""
    script = {3: (5, 2.0), 4: (6, 3.0), 5: (EOS, 9.0), 6: (7, 1.0), 7: (7, 1.0)}
    out = run(scripted(script), [1, EOS, 2], max_tokens=5)
    assert out.token_ids == [5, 6]
    assert out.finish_reason == "stop"
    assert out.stats.forward_passes == 3
    assert out.stats.tokens == 3
    assert out.usage.prompt_tokens == 3


def test_ignore_eos_fills_the_canvas(scripted: Callable[..., Engine]) -> None:
    script = {3: (5, 2.0), 4: (6, 3.0), 5: (EOS, 9.0), 6: (7, 1.0), 7: (7, 1.0)}
    out = run(scripted(script), [1, EOS, 2], max_tokens=5, ignore_eos=True)
    assert out.token_ids == [5, 6, EOS, 7, 7]
    assert out.finish_reason == "length"


def test_the_mask_id_in_a_prompt_is_text(scripted: Callable[..., Engine]) -> None:
    engine = scripted({0: (3, 9.0), 1: (4, 9.0), 2: (5, 9.0)})
    out = run(engine, [MASK, 1], max_tokens=1)
    assert out.token_ids == [5]
    assert out.stats.forward_passes == 1


def test_the_mask_token_is_never_proposed(scripted: Callable[..., Engine]) -> None:
    engine = scripted({0: (MASK, 99.0), 1: (MASK, 99.0)})
    for temperature in (0.0, 2.0):
        assert MASK not in run(engine, [], max_tokens=2, temperature=temperature).token_ids


def test_answers_end_at_max_tokens_inside_a_block(scripted: Callable[..., Engine]) -> None:
    """Block 8, prompt 3, 6 tokens: the canvas has 16 places and only 3..8 are decided."""
    engine = scripted({p: (5, 5.0 - p / 10) for p in range(16)}, block=8)
    out = run(
        engine, [1, 2, 3], max_tokens=6, cache="block", iteration="blockwise:length=8:aligned=true"
    )
    assert out.token_ids == [5] * 6
    assert out.stats.forward_passes == 6
    rows = engine.model.rows
    assert rows[0] == list(range(8))
    assert rows[5] == list(range(16))
    assert out.stats.rows_run == sum(map(len, rows)) == 5 * 8 + 16


def test_first_done_leaves_first_and_late_ones_join(scripted: Callable[..., Engine]) -> None:
    engine = scripted(dict.fromkeys(range(40), (5, 1.0)))
    engine.add(request("long", [], SamplingParams(max_tokens=30)))
    engine.step()
    engine.add(request("short", [], SamplingParams(max_tokens=2)))
    done, steps = [], 0
    while engine.busy:
        steps += 1
        done += [(e.id, steps) for e in engine.step() if isinstance(e, TextEvent) and e.output]
    assert done == [("short", 2), ("long", 29)]


def test_abort_frees_pages_at_any_step(scripted: Callable[..., Engine]) -> None:
    engine = scripted(dict.fromkeys(range(40), (5, 1.0)))
    for steps in range(4):
        engine.add(request("a", [], SamplingParams(max_tokens=30)))
        for _ in range(steps):
            engine.step()
        (event,) = engine.abort("a")
        assert event.output.finish_reason == "abort"
        assert engine.pool.free == engine.pool.pages
        assert not engine.busy
    assert engine.abort("a") == []


def test_waits_for_pages_and_is_then_served(scripted: Callable[..., Engine]) -> None:
    """16 pages of 32 places; ten requests of 3 pages each: five run, the others wait their turn."""
    engine = scripted(dict.fromkeys(range(70), (5, 1.0)))
    requests = [request(str(i), [1] * 60, SamplingParams(max_tokens=6)) for i in range(10)]
    for one in requests:
        engine.add(one)
    engine.step()
    assert len(engine.scheduler.running) == 5
    assert len(serve(engine, [])) == 10


def test_a_request_that_can_never_fit_is_refused(models: dict) -> None:
    from dinfer.engine.engine import Limits

    loaded = models["llada"]
    engine = Engine(loaded.model, loaded.facts, None, Limits(pages=2))
    with pytest.raises(RequestError, match=r"needs 4 pages .* the K/V pool has 2"):
        engine.add(request("a", [1] * 100, SamplingParams(max_tokens=28)))
    assert not engine.busy


def test_rows_are_shared_fairly(scripted: Callable[..., Engine]) -> None:
    """Ten sequences of 20 rows under a limit of 40 rows a step: two at a time, all within five
    steps.
    """
    engine = scripted(dict.fromkeys(range(20), (5, 1.0)))
    engine.scheduler.max_rows = 40
    for i in range(10):
        engine.add(request(str(i), [], SamplingParams(max_tokens=20)))
    seen: list[str] = []
    for _ in range(5):
        events = [e.id for e in engine.step() if isinstance(e, CanvasEvent)]
        assert len(events) == 2
        seen += events
    assert sorted(seen) == [str(i) for i in range(10)]


def test_who_is_new_goes_first(scripted: Callable[..., Engine]) -> None:
    """Four canvases of 30 rows take turns under a limit of 70; one of 20 comes and is in the next
    step, though it came last, and in turns with the others once it has given out text.
    """
    engine = scripted({p: (5, 9.0 - 0.2 * p) for p in range(30)})
    engine.scheduler.max_rows = 70
    slow = SamplingParams(max_tokens=30)
    for i in range(4):
        engine.add(request(f"old{i}", [], slow))

    def ran() -> list[str]:
        return sorted(event.id for event in engine.step() if isinstance(event, CanvasEvent))

    turns = [["old0", "old1"], ["old2", "old3"]]
    assert [ran() for _ in range(4)] == turns * 2
    engine.add(request("new", [], replace(slow, max_tokens=20)))
    assert ran() == ["new", "old0"]
    assert ran() == ["old1", "old2"]
    assert [len(ran()) for _ in range(3)] == [2, 2, 2]
    assert set(serve(engine, [])) == {"new", *turns[0], *turns[1]}


def test_nobody_is_new_for_long(scripted: Callable[..., Engine]) -> None:
    """A canvas that fills from its end has no settled text until the last step; it counts as new
    for four steps and keeps one that is not new waiting no longer than that.
    """
    engine = scripted({p: (5, 1.0 + 0.2 * p) for p in range(30)})
    engine.scheduler.max_rows = 30
    params = SamplingParams(max_tokens=30, iteration="blockwise:length=30")

    def ran(steps: int) -> str:
        found = [e.id for _ in range(steps) for e in engine.step() if isinstance(e, CanvasEvent)]
        return "".join(found)

    engine.add(request("a", [], params))
    assert ran(4) == "aaaa"
    engine.add(request("b", [], params))
    assert ran(4) == "bbbb"
    assert ran(6) == "ababab"


def test_provisional_events_make_up_the_answer(scripted: Callable[..., Engine]) -> None:
    engine = scripted({p: (p, 3.0 + (p * 7) % 5) for p in range(14)})
    engine.add(request("a", [1], SamplingParams(max_tokens=12)))
    canvas: dict[int, int] = {}
    output = None
    while engine.busy:
        for event in engine.step():
            if isinstance(event, CanvasEvent):
                canvas |= dict(zip(event.positions, event.token_ids, strict=True))
            elif event.output:
                output = event.output
    assert output is not None
    assert [canvas[place] for place in range(12)] == output.token_ids


def test_no_end_of_text_among_the_first(scripted: Callable[..., Engine]) -> None:
    """The end is the likeliest at 1, 2 and 3, and 6 the second best (e^2 to 13 others and e^9): it
    is taken where the end is forbidden, with its raw probability.
    """
    engine = scripted(dict.fromkeys(range(1, 4), (EOS, 9.0)))
    engine.model.logits[:, 6] = 2.0  # type: ignore[operator, index]
    empty = run(engine, [1], max_tokens=6)
    assert (empty.token_ids, empty.finish_reason) == ([], "stop")
    for temperature in (0.0, 1e-3):
        out = run(engine, [1], max_tokens=6, min_tokens=2, logprobs=True, temperature=temperature)
        assert (out.token_ids, out.finish_reason) == ([6, 6], "stop")
        raw = math.exp(2) / (math.exp(9) + math.exp(2) + 13)
        assert out.logprobs == pytest.approx([math.log(raw)] * 2, rel=1e-4)
    with pytest.raises(RequestError, match="min_tokens is 7; it must be at most 6"):
        SamplingParams(max_tokens=6, min_tokens=7)


def test_repetition(scripted: Callable[..., Engine]) -> None:
    """Twelve tokens in a circle of four have 9 runs of four, 4 of them different."""
    assert repetition([1, 2, 3, 4] * 3) == pytest.approx(5 / 9)
    assert repetition(range(10)) == 0
    assert repetition([5] * 3) == 0
    out = run(scripted(dict.fromkeys(range(8), (5, 1.0))), [], max_tokens=8)
    assert out.stats.repetition == pytest.approx(0.8)
