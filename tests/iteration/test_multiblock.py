"""Several blocks in flight."""

from collections.abc import Callable

import numpy as np
import pytest

from dinfer.canvas import Canvas
from dinfer.engine.engine import Engine
from dinfer.errors import RequestError
from dinfer.registry import build
from dinfer.request import CanvasEvent, Output, SamplingParams
from dinfer.step import Part

from ..conftest import EOS, FAMILIES, allows, decoder_for, request, serve


def run(engine: Engine, **options: object) -> Output:
    params = SamplingParams(ignore_eos=True, **options)  # type: ignore[arg-type]
    return serve(engine, [request("a", [3, 4, 5], params)])["a"]


def test_which_blocks_are_in_flight() -> None:
    """Blocks of 4 from position 2: one joins when a quarter of the one before is set, and is
    decided in full when three quarters are.
    """
    canvas = Canvas([7, 7, *[None] * 13], 2, 15, 99, None)
    iteration = build("iteration", "multiblock:length=4:most=3:add=0.25:ready=0.75:sure=0.8")

    def after(*places: int) -> tuple[Part, ...]:
        canvas.write(np.array(places, dtype=np.int64), np.full(len(places), 3))
        window = iteration.window(canvas)
        assert window is not None
        assert (window.start, window.stop) == (window.parts[0].start, window.parts[-1].stop)
        return window.parts

    assert after() == (Part(2, 6),)
    assert after(4) == (Part(2, 6), Part(6, 10, 0.8))
    assert after(8) == (Part(2, 6), Part(6, 10, 0.8), Part(10, 14, 0.8))
    assert after(11, 2, 3) == (Part(2, 6), Part(6, 10), Part(10, 14, 0.8))  # at most three
    assert after(5) == (Part(6, 10), Part(10, 14, 0.8), Part(14, 15, 0.8))
    canvas.limit = 13  # an end at 12: nothing behind its block is needed
    assert after() == (Part(6, 10), Part(10, 14, 0.8))


@pytest.mark.parametrize(("block", "cache"), [(None, "none"), (4, "block")])
def test_the_rule_step_by_step(
    scripted: Callable[..., Engine], block: int | None, cache: str
) -> None:
    """Blocks 0..3, 4..7, 8..11. Logits of 12 are sure (0.9999), 3 is 0.59, others fall with them.

    Step 1: the first block alone; 0 is sure. Step 2: the best of the first (1); the second has
    joined, and only its sure 5 is set. Step 3: 2; the third block has joined and has nothing sure.
    Three of four are set now, so the second block is decided in full: step 4 sets 3 and the best
    of the second (6). Then the first is done, and the third still waits for the second.
    """
    said = [(0, 12.0), (1, 3.0), (2, 2.9), (3, 2.8), (5, 12.0), (6, 2.7), (7, 2.6), (4, 2.5)]
    said += [(8, 2.0), (9, 1.9), (10, 1.8), (11, 1.7)]
    engine = scripted({place: (place, logit) for place, logit in said}, block=block)
    spec = "multiblock:length=4:add=0.25:ready=0.75:aligned=true"
    params = SamplingParams(max_tokens=12, decoder="threshold", iteration=spec, cache=cache)
    engine.add(request("a", [], params))
    order = []
    while engine.busy:
        order += [e.positions for e in engine.step() if isinstance(e, CanvasEvent)]
    assert order == [[0], [1, 5], [2], [3, 6], [7], [4, 8], [9], [10], [11]]
    sight = [4, 8, 12, 12] if block else [12] * 4
    assert [rows[-1] + 1 for rows in engine.model.rows[:4]] == sight


def test_no_block_joins_behind_the_end(scripted: Callable[..., Engine]) -> None:
    """The end at 1 is sure; without it the second block would have joined in step 2."""
    engine = scripted({0: (5, 1.0), 1: (EOS, 12.0), 4: (6, 12.0)})
    engine.add(request("a", [], SamplingParams(max_tokens=8, iteration="multiblock:length=4")))
    events = [e.positions for _ in range(2) for e in engine.step() if isinstance(e, CanvasEvent)]
    assert events == [[1], [0]]
    assert not engine.busy


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", ["threshold:threshold=0.4", "edit:threshold=0.3:edit=0.2"])
def test_one_block_in_flight_is_blockwise(
    make_engine: Callable[..., Engine], family: str, decoder: str
) -> None:
    options = {"max_tokens": 30, "decoder": decoder_for(make_engine(family), decoder)}
    plain = run(make_engine(family), iteration="blockwise:length=8", **options)
    for spec in ("most=1", "add=1:ready=1"):
        found = run(make_engine(family), iteration=f"multiblock:length=8:{spec}", **options)
        assert found.token_ids == plain.token_ids
        assert found.stats.rows_run == plain.stats.rows_run


@pytest.mark.parametrize("family", ["llada", "dream", "sdar"])
@pytest.mark.parametrize("cache", ["block", "vicinity", "dkv", "interval"])
def test_under_caches(make_engine: Callable[..., Engine], family: str, cache: str) -> None:
    """No row is read that never ran, and `block` gives the tokens of `none`."""
    if not allows(make_engine(family), cache=cache):
        return
    aligned = "true" if family == "sdar" else "false"
    spec = f"multiblock:length=8:add=0.2:ready=0.5:sure=0.3:aligned={aligned}"
    options = {"max_tokens": 40, "iteration": spec, "decoder": "threshold:threshold=0.4"}
    found = run(make_engine(family), cache=cache, **options)
    assert len(found.token_ids) == 40 and max(found.token_ids) < 320
    if cache == "block":
        assert found.token_ids == run(make_engine(family), cache="none", **options).token_ids


@pytest.mark.parametrize("spec", ["length=0", "most=-1", "add=0", "ready=1.5", "sure=nan"])
def test_options_out_of_range_are_named(spec: str) -> None:
    with pytest.raises(RequestError, match=spec.split("=")[0]):
        build("iteration", f"multiblock:{spec}")
