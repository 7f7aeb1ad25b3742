"""Batches over workers on Ray. Needs the extra `ray`."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dinfer.batch.application import engine
from dinfer.batch.run import Batch
from dinfer.cluster.connect import share, with_kv_memory
from dinfer.cluster.workers import engines
from dinfer.errors import RequestError, UnknownName

from ..batch.conftest import asked, problem, read, said, write
from .conftest import actors, kill

pytest.importorskip("ray")
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "compiled": False}
LINES = [*(problem(i) for i in range(2, 122)), asked("wrong", prompt="a", max_tokens=0)]


@pytest.mark.usefixtures("cluster")
def test_a_worker_is_killed(tmp_path: Path) -> None:
    """Nothing is lost or doubled, and every answer is that of one engine."""
    source = write(tmp_path / "in", LINES)
    killed: list[int] = []

    def show(found: Any) -> None:
        if not killed and len(read(tmp_path / "many")) > 20:
            killed.extend(actors("Worker")[:1])
            kill(killed[0])

    async def main(opened: Any, out: str, show: Any) -> None:
        with Batch.open(source, tmp_path / out) as work:
            async with opened as call:
                await work.run(call, 32, show)

    many = engines(2, None, "tiny-sdar", "tiny-sdar", OPTIONS)
    asyncio.run(main(many, "many", show))
    assert killed
    one = engine("tiny-sdar", "tiny-sdar", OPTIONS)
    asyncio.run(main(one, "one", lambda found: None))
    found, expected = (
        sorted(map(said, read(tmp_path / name)), key=lambda line: line[0])
        for name in ("many", "one")
    )
    assert len(found) == len(LINES)
    assert found == expected


@pytest.mark.usefixtures("cluster")
def test_refusals(tmp_path: Path) -> None:
    async def main(*words: Any) -> None:
        async with engines(*words, "m", "no-such-model", OPTIONS) as call:
            await call("/v1/completions", b"{}")

    with pytest.raises(RequestError, match=r"9 engines need a CPU each; the Ray cluster has 4\."):
        asyncio.run(main(9, None))
    with pytest.raises(UnknownName, match="no-such-model"):
        asyncio.run(main(1, None))


def test_shares() -> None:
    class Ray:
        def __init__(self, **resources: float) -> None:
            self.cluster_resources = lambda: resources

    assert share(Ray(CPU=9.0), 2, "auto") == {"num_cpus": 4}
    assert share(Ray(CPU=64.0, GPU=8.0), 8, "auto") == {"num_gpus": 1}
    assert share(Ray(CPU=64.0, GPU=8.0), 16, "cpu") == {"num_cpus": 4}
    with pytest.raises(RequestError, match="9 engines need a GPU each"):
        share(Ray(CPU=64.0, GPU=8.0), 9, "cuda")


def test_memory_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they take what one alone would."""
    monkeypatch.setattr("dinfer.cluster.connect.available_memory", lambda: 32 * 2**30)
    assert with_kv_memory({"dtype": "auto", "kv_memory": None}, 4) == {
        "dtype": "auto",
        "kv_memory": 2.0,
    }
    assert with_kv_memory({"kv_memory": 3.0}, 4) == {"kv_memory": 3.0}


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A cluster of its own; the run itself is killed, goes on, and a worker of it is killed."""
    source = write(tmp_path / "in.jsonl", [problem(i) for i in range(2, 802)])
    out = tmp_path / "out.jsonl"
    words = [str(source), str(out), "--workers", "2", "--no-compile", "--device", "cpu", "--json"]
    command = [sys.executable, "-m", "dinfer", "batch", *words]

    def begin(more: int) -> Any:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        before = out.read_bytes().count(b"\n") if out.exists() else 0
        while not out.exists() or out.read_bytes().count(b"\n") < before + more:
            assert process.poll() is None
            time.sleep(0.02)
        return process

    process = begin(100)
    process.kill()
    process.communicate()
    process = begin(100)
    kill(actors("Worker", process.pid)[0])
    stdout, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    figures = json.loads(stdout)
    assert figures["errors"] == 0
    assert figures["skipped"] + figures["answered"] == 800
    found = [line["custom_id"] for line in read(out)]
    assert sorted(found) == sorted(f"p{i}" for i in range(2, 802))


@pytest.mark.slow
def test_no_cluster_there() -> None:
    command = "from dinfer.cluster.connect import connected\nwith connected('127.0.0.1:9'): pass"
    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert "RequestError: There is no Ray cluster at '127.0.0.1:9'" in ended.stderr
