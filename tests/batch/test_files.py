"""What is in the files: every line has its result once, whenever a run is stopped."""

import asyncio
import errno
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.batch.line import Reply, check
from dinfer.batch.results import Results
from dinfer.batch.run import Batch, answer
from dinfer.batch.source import MOST_BYTES
from dinfer.errors import RequestError

from .conftest import asked, echo, read, write

GOOD = [asked(f"é{i}" if i == 3 else f"c{i}", turns=i * 7 % 5) for i in range(9)]
BAD: list[tuple[Any, str]] = [
    ("nonsense", "not valid JSON"),
    ([1], "not a JSON object"),
    ({"url": "/v1/completions", "body": {}}, "custom_id is None"),
    (asked("x") | {"custom_id": 7}, "custom_id is 7"),
    (asked("\ud800"), "valid Unicode"),
    (asked("x1", url="/v1/embeddings"), "'/v1/embeddings'; it must be one of /v1/chat"),
    (asked("x2") | {"url": ["/v1/infill"]}, "it must be one of"),
    (asked("x3") | {"method": "GET"}, "method is 'GET'"),
    (asked("x4") | {"body": None}, "body is None"),
    (asked("x5", stream=True), "no streams"),
    (asked("x6") | {"bdy": 1}, "Did you mean 'body'?"),
]


def mixed(path: Path) -> Path:
    """Good lines with bad ones between them, and one that is no text."""
    lines = [json.dumps(line).encode() for line in GOOD]
    bad = [b if isinstance(b, str) else json.dumps(b) for b, _ in BAD]
    lines[4:4] = [*(text.encode() for text in bad), b"\xff\xfe"]
    path.write_bytes(b"\n".join(lines))  # no line end at the end
    return path


def test_bad_lines_become_error_lines(tmp_path: Path, run: Callable) -> None:
    out = tmp_path / "out"
    run(mixed(tmp_path / "in"), out, in_order=True)
    found = read(out)
    assert [line["id"] for line in found] == [f"batch_req_{i}" for i in range(1, 22)]
    for line, (_, reason) in zip(found[4:], BAD, strict=False):
        assert line["response"] is None
        assert line["error"]["code"] == "invalid_line"
        assert reason in line["error"]["message"]
    assert [line["custom_id"] for line in found[9:15]] == [f"x{i}" for i in range(1, 7)]
    good = [line["response"]["body"]["echo"] for line in found if line["response"]]
    assert good == [line["body"] for line in GOOD]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_killed_at_any_byte(data: st.DataObject) -> None:
    """Whatever a kill left of the output, the next run makes it whole and doubles nothing."""
    in_order, window = data.draw(st.booleans()), data.draw(st.integers(1, 30))
    with tempfile.TemporaryDirectory() as folder:
        source, out = mixed(Path(folder, "in")), Path(folder, "out")

        def run() -> int:
            shown: list[Any] = []
            with Batch.open(source, out, in_order) as work:
                asyncio.run(work.run(echo, window, shown.extend))
            return len(shown)

        assert run() == 21
        whole = out.read_bytes()
        kept = data.draw(st.integers(0, len(whole)))
        out.write_bytes(whole[:kept])
        assert run() == 21 - whole[:kept].count(b"\n")
        assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
        if in_order:
            assert out.read_bytes() == whole
        assert run() == 0


@pytest.mark.parametrize("in_order", [False, True])
def test_the_window_is_never_exceeded(in_order: bool) -> None:
    """Lines that were read and not written; the input is larger than any memory would be."""
    read_, written, most, calls, most_calls = 0, 0, 0, 0, 0

    def lines() -> Any:
        nonlocal read_, most
        for number in range(1, 501):
            read_ += 1
            most = max(most, read_ - written)
            yield check(number, asked(f"c{number}", turns=number * 37 % 23))

    def note(found: Any) -> None:
        nonlocal written
        written += len(found)

    async def call(url: str, body: bytes) -> Reply:
        nonlocal calls, most_calls
        calls += 1
        most_calls = max(most_calls, calls)
        try:
            return await echo(url, body)
        finally:
            calls -= 1

    asyncio.run(answer(lines(), call, note, 8, in_order))
    assert written == 500
    # One more line is read before a place for it is free.
    assert 1 < most <= 9
    assert 1 < most_calls <= 8


def test_a_line_too_long_is_not_kept(
    tmp_path: Path, run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_BYTES > 2**20
    monkeypatch.setattr("dinfer.batch.source.MOST_BYTES", 1000)
    lines = [asked("a"), asked("b", prompt="x" * 5000), asked("c")]
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    run(source, out, in_order=True)
    found = read(out)
    assert [line["custom_id"] for line in found] == ["a", None, "c"]
    assert "longer than 1000 bytes" in found[1]["error"]["message"]


def test_input_that_grew(tmp_path: Path, run: Callable) -> None:
    source, out = write(tmp_path / "in", GOOD[:5]), tmp_path / "out"
    assert len(run(source, out)) == 5
    write(source, GOOD)
    assert len(run(source, out)) == 4
    assert len(read(out)) == 9


def refusal(run: Callable, *words: Any, **options: Any) -> str:
    """What the refusal says."""
    with pytest.raises(RequestError) as caught:
        run(*words, **options)
    return str(caught.value)


def test_refusals(tmp_path: Path, run: Callable) -> None:
    source, out = write(tmp_path / "in", GOOD), tmp_path / "out"
    twice = write(tmp_path / "twice", [GOOD[0], GOOD[1], GOOD[2], GOOD[1]])
    assert "Lines 2 and 4 of" in refusal(run, twice, out)
    assert "same custom_id 'c1'" in refusal(run, twice, out)
    assert not out.exists()
    assert "no file" in refusal(run, tmp_path / "none", out)
    assert "both input and output" in refusal(run, source, source)
    assert "cannot be written" in refusal(run, source, tmp_path / "no" / "out")
    run(source, out)
    kept = out.read_bytes()
    other = write(tmp_path / "other", GOOD[1:])
    assert "does not have" in refusal(run, other, out)
    out.write_bytes(kept + b'{"something": "else"}\n')
    assert "Line 10 of" in refusal(run, source, out)
    out.write_bytes(kept + kept.splitlines(keepends=True)[0])
    assert "two results" in refusal(run, source, out)
    out.write_bytes(b"".join(reversed(kept.splitlines(keepends=True))))
    assert "not in the order" in refusal(run, source, out, in_order=True)
    assert run(source, out) == []


def test_one_run_at_a_time(tmp_path: Path, run: Callable) -> None:
    pytest.importorskip("fcntl")
    source, out = write(tmp_path / "in", GOOD), tmp_path / "out"
    other = Results(out)
    assert "another run" in refusal(run, source, out)
    other.close()
    assert len(run(source, out)) == 9


def test_a_full_disk(tmp_path: Path, run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source, out = write(tmp_path / "in", GOOD), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert "No space left" in refusal(run, source, out)
    run(source, out)
    assert len({line["custom_id"] for line in read(out)}) == len(read(out)) == 9
    assert "no file" in refusal(run, source, tmp_path)


def test_a_fault_of_the_caller_ends_the_run(tmp_path: Path, run: Callable) -> None:
    """It is no line's fault, so no line is answered with it."""

    async def broken(url: str, body: bytes) -> Reply:
        raise ConnectionError("gone")

    out = tmp_path / "out"
    with pytest.raises(ConnectionError, match="gone"):
        run(write(tmp_path / "in", GOOD), out, broken)
    assert out.read_bytes() == b""


def test_parquet(tmp_path: Path, run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr("dinfer.batch.source.ROWS_AT_ONCE", 4)
    bodies = [{"turns": 1, "prompt": None}, {"turns": None, "prompt": "p"}]
    rows = [{"custom_id": f"c{i}", "url": "/v1/infill", "body": bodies[i % 2]} for i in range(9)]
    source, texts = tmp_path / "in.parquet", tmp_path / "texts.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*rows, {"custom_id": None}]), source)
    as_text = [row | {"body": json.dumps(row["body"])} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist([*as_text, as_text[0] | {"body": "{"}]), texts)

    out = tmp_path / "out.parquet"
    assert len(run(source, out, in_order=True)) == 10
    found = parquet.read_table(out).to_pylist()
    assert [row["custom_id"] for row in found] == [*(f"c{i}" for i in range(9)), None]
    assert [json.loads(row["body"])["echo"] for row in found[:3]] == [
        {"turns": 1},
        {"prompt": "p"},
        {"turns": 1},
    ]
    assert found[9]["body"] is None
    assert "custom_id is None" in found[9]["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("in.parquet", "out.parquet", "texts.parquet")
    ]
    assert run(source, out) == []  # all is there

    assert "same custom_id 'c0'" in refusal(run, texts, tmp_path / "o")
    parquet.write_table(pyarrow.Table.from_pylist(as_text), texts)
    lines = tmp_path / "out.jsonl"
    run(texts, lines, in_order=True)
    assert [line["response"]["body"]["echo"] for line in read(lines)[:2]] == bodies
    assert "no column 'url'" in _without_url(tmp_path, pyarrow, parquet, run)
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    assert "no Parquet file" in refusal(run, tmp_path / "junk.parquet", lines)


def _without_url(folder: Path, pyarrow: Any, parquet: Any, run: Callable) -> str:
    path = folder / "bare.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"custom_id": "a", "body": "{}"}]), path)
    return refusal(run, path, folder / "o")


def test_a_parquet_file_is_made_whole_or_not_at_all(tmp_path: Path, run: Callable) -> None:
    """A run that ends early leaves a journal, with which the next one goes on."""
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source, out = write(tmp_path / "in", GOOD), tmp_path / "out.parquet"
    count = 0

    async def tired(url: str, body: bytes) -> Reply:
        nonlocal count
        count += 1
        if count > 5:
            await asyncio.sleep(0.05)  # what was answered is written meanwhile
            raise ConnectionError("gone")
        return await echo(url, body)

    with pytest.raises(ConnectionError):
        run(source, out, tired, window=2)
    assert not out.exists()
    kept = len(read(tmp_path / "out.parquet.partial.jsonl"))
    assert 0 < kept < 9
    assert len(run(source, out)) == 9 - kept
    assert parquet.read_table(out).num_rows == 9
