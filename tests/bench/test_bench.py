"""Benchmarks measure what they say: counts against arithmetic, sides against one another."""

import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dinfer import LLM, SamplingParams
from dinfer.bench import baseline
from dinfer.bench.fairness import Rounds, is_long, mixed, rounds
from dinfer.bench.machine import Timing, interleaved
from dinfer.bench.shape import SHAPES, open_any, random_model, write_checkpoint
from dinfer.bench.step import measure_step, work_of
from dinfer.bench.traffic import Answered, Ask, Load, Served, figures, in_process, over
from dinfer.bench.versus import Baseline, Canvas, Mode, Original, duel, until_end
from dinfer.errors import DinferError
from dinfer.loader.load import Loaded, load
from dinfer.request import Output, Stats, TextEvent, Usage

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [40, 41, 42, 43, 44, 45, 46]]


@pytest.fixture
def llm(models: dict[str, Loaded]) -> LLM:
    return LLM(models["llada"], kv_memory=0.05)


def test_work_of_a_step() -> None:
    model = random_model("tiny", "float32", "cpu", context=512).model
    d, wide, layers, vocab, rows, seen = 256, 640, 4, 832, 32, 132
    body = layers * (4 * d * d + 3 * d * wide)
    norms = (2 * layers + 1) * d
    work = work_of(model, rows, seen - rows, 3)
    stored = layers * 2 * d * seen
    assert work.bytes == 4 * (body + norms + vocab * d + 3 * stored)
    # Each weight once per row, scores and mixing once per row, position and channel.
    products = 2 * rows * (body + vocab * d) + 2 * 2 * layers * rows * seen * d
    assert work.operations == pytest.approx(3 * products, rel=1e-3)


@pytest.mark.parametrize("quant", [None, "int8", "int4:group=32"])
def test_work_of_a_step_with_experts(quant: str | None) -> None:
    """8 experts of which a row takes 2: with one row 2 are read, with many all 8."""
    model = random_model("moe-tiny", "float32", "cpu", 512, quant).model
    d, wide, layers, vocab = 128, 64, 2, 832
    expert, attention = 3 * d * wide, 4 * d * d
    kept = 4 * ((2 * layers + 1) * d + layers * (8 * d + 2 * d // 4))
    kept += vocab * (d + 4) if quant == "int8" else 4 * vocab * d  # the head
    for rows, touched in ((1, 2), (400, 8)):
        work = work_of(model, rows, 0, 1)
        linear = layers * (attention + touched * expert)
        scales = layers * (4 * d + touched * (2 * wide + d))  # rows
        stored = {None: 4 * linear, "int8": linear + 4 * scales}.get(
            quant, linear * (1 / 2 + 1 / 8)
        )
        assert work.bytes == pytest.approx(kept + stored + 4 * layers * 2 * d * rows, rel=1e-3)
        products = 2 * rows * (layers * (attention + 2 * expert + 8 * d) + vocab * d)
        pairs = 2 * 2 * layers * rows * rows * d
        assert work.operations == pytest.approx(products + pairs, rel=3e-3)


@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_random_shapes_run_in_fewer_bits(name: str, quant: str | None) -> None:
    loaded = open_any(name, "float32", "cpu", quant)
    found = measure_step(loaded, 8, 8, 1, repeats=1)
    assert found.milliseconds.median > 0
    (out,) = LLM(loaded, kv_memory=0.05).generate(
        [[5, 6, 7]], SamplingParams(64, ignore_eos=True, decoder="fixed:steps=8")
    )
    assert len(out.token_ids) == 64


def test_a_measured_step_is_not_below_its_parts() -> None:
    found = measure_step(random_model("tiny", "float32", "cpu"), 8, 40, 2, repeats=3)
    assert found.milliseconds.repeats == 3
    assert found.milliseconds.least <= found.milliseconds.median <= found.milliseconds.most
    assert found.floor == max(found.floor_bytes, found.floor_operations)
    assert found.ratio == found.milliseconds.median / found.floor


def test_too_long_a_context_is_refused(models: dict[str, Loaded]) -> None:
    context = models["llada"].facts.context
    with pytest.raises(DinferError, match=f"context of this model is {context}"):
        measure_step(models["llada"], 32, context, 1, repeats=1)


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = interleaved({"a": lambda: side("a"), "b": lambda: side("b")}, 3)
    assert "".join(order) == "ababab" and found == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert Timing.of([3.0, 1.0, 2.0]) == Timing(2.0, 1.0, 3.0, 3, p95=3.0)
    assert Timing.of([float(n) for n in range(100, 0, -1)]).p95 == 95.0


def test_arrivals_are_a_poisson_process() -> None:
    times = Load(rate=50.0, seed=7).times(4000)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) > 0
    # Exponential gaps: the deviation equals the mean.
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.08)
    assert Load(3).times(3) == [0.0] * 3


LOADS = [Load(), Load(2), Load(3), Load(rate=60.0)]


@pytest.mark.parametrize("load", LOADS)
def test_traffic_gives_the_answers_of_generate(llm: LLM, load: Load) -> None:
    params = SamplingParams(24, decoder="threshold:threshold=0.5", ignore_eos=True)
    expected = [out.token_ids for out in llm.generate(PROMPTS, params)]
    asks = [Ask(prompt, params) for prompt in PROMPTS]
    inside = []
    real = llm.engine.step
    llm.engine.step = lambda: inside.append(llm.engine.load) or real()  # type: ignore
    served = in_process(llm, asks, load)
    assert [out.token_ids for out in served.outputs] == expected
    assert served.tokens == 24 * len(PROMPTS)
    assert all(0 <= a.first <= a.latency <= served.seconds for a in served.answers)
    assert served.seconds >= max(load.times(3))
    if load.rate is None:
        assert max(inside) == load.at_once
    else:
        # From the moment it came, though it had to wait for the step that was under way.
        ends = [at + a.latency for at, a in zip(load.times(3), served.answers, strict=True)]
        assert max(ends) <= served.seconds


def test_traffic_over_a_connection(llm: LLM) -> None:
    """Each caller waits for the answer; with a rate nobody does."""
    lock, now, most = threading.Lock(), 0, 0

    def send(ask: Ask) -> Iterator[TextEvent]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        yield TextEvent("", "a")
        time.sleep(0.03)
        with lock:
            now -= 1
        yield TextEvent("", "", answer_of(int(str(ask.prompt)), 5).output)

    asks = [Ask(str(number), SamplingParams()) for number in range(6)]
    for coming, together in ((Load(), 1), (Load(2), 2), (Load(rate=1000.0), 6)):
        now = most = 0
        served = over(send, asks, coming)
        assert [a.output.stats.tokens for a in served.answers] == list(range(6))
        assert most == together
        assert all(a.first >= 0.02 and a.latency >= a.first + 0.03 for a in served.answers)
        assert served.seconds >= 6 * 0.05 / together


def answer_of(tokens: int, forwards: int, first: float = 0.1, latency: float = 1.0) -> Answered:
    """An answer that cost so much."""
    stats = Stats(forward_passes=forwards, tokens=tokens)
    return Answered(Output("", "", [], "stop", Usage(1, tokens), stats), first, latency)


def test_figures_of_runs() -> None:
    runs = [
        Served(2.0, [answer_of(6, 2, 0.1, 1.0), answer_of(4, 3, 0.3, 2.0)]),
        Served(5.0, [answer_of(6, 2, 0.2, 3.0), answer_of(4, 3, 0.4, 4.0)]),
    ]
    found = figures(runs)
    assert found["tokens_per_second"]["median"] == 3.5  # of 5 and 2
    assert found["seconds_per_request"]["median"] == 2.5
    assert found["seconds_to_first_text"] == {
        "median": 0.25,
        "least": 0.1,
        "most": 0.4,
        "p95": 0.4,
        "repeats": 4,
    }
    assert found["tokens_per_forward"] == 2.0


def test_fairness_is_arithmetic_on_the_runs() -> None:
    """Four requests that all come at once and four that come among others; the fifth is long."""
    alone = Served(1.0, [answer_of(1, 1, 0.1, 1.0)] * 8)
    among = Served(1.0, [answer_of(1, 1, w, s) for w, s in
                         zip([1.0] * 4 + [0.2, 0.3, 0.2, 0.3], [2.0] * 4 + [4.0] + [2.0] * 3,
                             strict=True)])  # fmt: skip
    found = Rounds(4, [alone], [among]).figures()
    assert found["seconds_to_first_text_all_at_once"]["median"] == 1.0
    assert found["seconds_to_first_text_among_others"]["median"] == 0.25
    assert found["first_text_ratio"] == pytest.approx(2.5)
    assert found["first_text_ratio_p95"] == pytest.approx(3.0)
    assert found["slowdown_of_short"]["median"] == 2.0 and found["slowdown_of_long"]["most"] == 4.0
    # Eighteen squared over eight times 44: seven slowdowns of 2 and one of 4.
    assert found["fairness"] == pytest.approx(324 / 352)


def test_rounds_of_a_mix(llm: LLM) -> None:
    params = SamplingParams(8, ignore_eos=True)
    asks = mixed(["1"] * 9, params, 24)
    assert [ask.params.max_tokens for ask in asks] == [8] * 4 + [24] + [8] * 4
    asks = [Ask([5, 6], ask.params) for ask in asks]
    found = rounds(partial(in_process, llm), asks, 3, repeats=2)
    for run in (*found.alone, *found.among):
        assert [a.output.stats.tokens for a in run.answers] == [24 if is_long(n) else 8
                                                                for n in range(9)]  # fmt: skip
    assert found.figures()["slowdown_of_short"]["repeats"] == 16


def test_duel_of_like_with_like(llm: LLM) -> None:
    """With Fast-dLLM's own strategies ours gives the rival's tokens."""
    canvas = Canvas(32, block=8)
    rival = Baseline(llm.loaded, canvas)
    params = SamplingParams(
        32, decoder="threshold:threshold=0.9", cache="dual", iteration="blockwise:length=8"
    )
    found = duel(llm, rival, PROMPTS, params, repeats=2)
    assert {m.cache for m in rival.modes()} == {"none", "prefix", "dual"}
    assert len(found.ours) == len(found.theirs) == len(found.many) == 2
    dual = rival.run(PROMPTS, Mode("dual", 0.9, steps=8))
    for prompt, ids, out in zip(PROMPTS, dual.ids, found.ours[0].outputs, strict=True):
        settings = baseline.Settings(32, 8, "dual", 0.9, 8)
        whole, _ = baseline.generate(llm.loaded.model, prompt, llm.facts.mask_id, settings)
        assert ids == until_end(whole, llm.facts.eos_ids)
        assert out.token_ids == [t for t in ids if t not in llm.facts.eos_ids]
    figures = found.figures()
    ratio = figures["rival_seconds_per_request"] / figures["seconds_per_request"]
    assert figures["latency_ratio"] == pytest.approx(ratio)


def test_until_end() -> None:
    assert until_end([4, 5, 0, 0], frozenset({0})) == [4, 5, 0]
    assert until_end([4, 5], frozenset({0})) == [4, 5]


STUB = """
import torch

def generate(model, prompt, steps, gen_length, block_length, mask_id, threshold=None, factor=None):
    print("a line that is no answer")
    tail = torch.full((1, gen_length), model + steps + block_length)
    return torch.cat((prompt, tail), dim=1), 7

generate_with_prefix_cache = generate_with_dual_cache = generate
"""
MODEL = """
class LLaDAModelLM:
    @classmethod
    def from_pretrained(cls, folder, torch_dtype):
        return cls()
    def eval(self):
        return 100
"""


def test_a_checkout_is_driven_in_its_own_process(tmp_path: Path, models: dict[str, Loaded]) -> None:
    (tmp_path / "llada" / "model").mkdir(parents=True)
    (tmp_path / "llada" / "generate.py").write_text(STUB)
    (tmp_path / "llada" / "model" / "modeling_llada.py").write_text(MODEL)
    canvas = Canvas(64, block=16)
    with Original(tmp_path, sys.executable, tmp_path, models["llada"], canvas) as rival:
        assert any(mode.factor for mode in rival.modes())
        found = rival.run(PROMPTS, Mode("prefix", 0.9, steps=16))
    assert found.ids == [[100 + 64 + 16] * 64] * 3
    assert found.passes == [7, 7, 7] and len(found.seconds) == 3


def test_what_is_wrong_with_a_checkout_is_said(tmp_path: Path, models: dict[str, Loaded]) -> None:
    loaded, canvas = models["llada"], Canvas(32)
    with pytest.raises(DinferError, match=r"has no llada/generate\.py"):
        Original(tmp_path, sys.executable, tmp_path, loaded, canvas)
    (tmp_path / "llada").mkdir()
    (tmp_path / "llada" / "generate.py").write_text("import a_module_that_is_missing")
    with pytest.raises(DinferError, match="a_module_that_is_missing"):
        Original(tmp_path, sys.executable, tmp_path, loaded, canvas)
    with pytest.raises(DinferError, match="cannot be run"):
        Original(tmp_path, str(tmp_path / "python"), tmp_path, loaded, canvas)


def test_a_random_shape_written_out_loads_again(tmp_path: Path) -> None:
    loaded = random_model("tiny", "float32", "cpu")
    write_checkpoint("tiny", "float32", tmp_path)
    again = load(str(tmp_path), "float32", "cpu")
    assert again.model.shape == loaded.model.shape and again.facts == loaded.facts
    params = SamplingParams(8, ignore_eos=True)
    one, other = (LLM(x).generate([[1, 2, 3]], params)[0].token_ids for x in (loaded, again))
    assert one == other
    assert json.loads((tmp_path / "config.json").read_text())["d_model"] == SHAPES["tiny"].hidden
