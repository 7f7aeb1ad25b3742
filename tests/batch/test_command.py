"""`dinfer batch` beside the server, and killed in mid-run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dinfer import AsyncLLM
from dinfer.batch.application import Application
from dinfer.batch.run import Batch
from dinfer.errors import EngineError
from dinfer.server.app import create_app

from .conftest import asked, problem, read, said, write

COMMAND = [sys.executable, "-m", "dinfer", "batch"]
OPTIONS = ["--dtype", "float32", "--device", "cpu", "--no-compile"]
LINES: list[Any] = [
    problem(3),
    asked(
        "chat",
        "/v1/chat/completions",
        messages=[{"role": "user", "content": problem(4)["body"]["prompt"]}],
        logprobs=True,
        max_tokens=32,
        seed=1,
        n=3,
    ),
    asked("infill", "/v1/infill", text="Add 7: 12+7=[BLANK:2].", seed=1),
    asked("wrong", prompt="a", max_tokens="many"),
    asked("unknown", prompt="a", colour="red"),
    asked("long", prompt="a", max_tokens=10**6),
    asked("model", prompt="a", model="tiny-sdr"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM("tiny-sdar", dtype="float32", device="cpu", max_sequences=2)
    yield made
    made.close()


def test_the_answers_are_those_of_the_server(tmp_path: Path, llm: AsyncLLM) -> None:
    """More lines at a time, with three answers each, than the server would let wait."""
    extra = [problem(i) for i in range(5, 25)]
    source, out = write(tmp_path / "in", [*LINES, *extra]), tmp_path / "out"
    app = create_app({"tiny-sdar": llm})

    async def main() -> list[Any]:
        with Batch.open(source, out, in_order=True) as work:
            await work.run(Application({"tiny-sdar": llm}).call, 16, lambda found: None)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            replies = [await client.post(line["url"], json=line["body"]) for line in LINES]
        return [
            said(
                {
                    "custom_id": line["custom_id"],
                    "response": {"status_code": reply.status_code, "body": reply.json()},
                }
            )
            for line, reply in zip(LINES, replies, strict=True)
        ]

    expected = asyncio.run(main())
    found = [said(line) for line in read(out)]
    assert found[: len(LINES)] == expected
    assert [status for _, status, _ in expected] == [200, 200, 200, 400, 400, 400, 404]
    assert [status for _, status, _ in found[len(LINES) :]] == [200] * 20


def test_an_engine_that_stopped_ends_the_run(tmp_path: Path) -> None:
    """The lines are not at fault, and are answered by the next run."""
    llm = AsyncLLM("tiny-sdar", dtype="float32", device="cpu")
    llm.close()
    out = tmp_path / "out"
    with pytest.raises(EngineError), Batch.open(write(tmp_path / "in", LINES), out) as work:
        asyncio.run(work.run(Application({"m": llm}).call, 4, lambda found: None))
    assert out.read_bytes() == b""


def test_killed_and_started_again(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [problem(i) for i in range(2, 202)])
    out = tmp_path / "out.jsonl"
    command = [*COMMAND, str(source), str(out), *OPTIONS, "--max-sequences", "4"]
    kept = 0
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not out.exists() or out.read_bytes().count(b"\n") < kept + 10:
                assert process.poll() is None
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert kept + 10 <= out.read_bytes().count(b"\n") < 200
        kept = out.read_bytes().count(b"\n")
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_')  # as a kill amid a write would leave it
    ended = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
    figures = json.loads(ended.stdout)
    assert figures["skipped"] == kept
    assert figures["answered"] == 200 - kept
    assert figures["errors"] == 0
    found = read(out)
    assert sorted(line["custom_id"] for line in found) == sorted(f"p{i}" for i in range(2, 202))

    once = tmp_path / "once.jsonl"
    ended = subprocess.run(
        [*COMMAND, str(source), str(once), *OPTIONS, "--in-order"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "200 of 200 lines, 0 errors" in ended.stderr
    assert [line["custom_id"] for line in read(once)] == [f"p{i}" for i in range(2, 202)]
    assert sorted(map(_text, found)) == sorted(map(_text, read(once)))


def _text(found: Any) -> tuple[str, str]:
    return found["custom_id"], found["response"]["body"]["choices"][0]["text"]


def test_bad_input(tmp_path: Path) -> None:
    """One sentence and code 2, before a model is loaded."""
    source = write(tmp_path / "in", [asked("a"), asked("a")])
    words = [str(source), str(tmp_path / "out"), "-m", "no-such-model"]
    ended = subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=os.environ)
    assert ended.returncode == 2
    assert ended.stderr.startswith("Error: Lines 1 and 2 of")
    assert ended.stderr.count("\n") == 1
