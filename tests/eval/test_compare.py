"""Strategies against one another, and the search for the best."""

from pathlib import Path

import pytest

from dinfer import LLM, SamplingParams
from dinfer.errors import RequestError
from dinfer.eval.compare import Choice, Meter, Row, every, file_items, front, task_items, tune


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
