"""`dinfer serve` as a process of its own, over a real socket."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from dinfer.cli import main as command
from dinfer.cli.serve import named, read_keys
from dinfer.errors import RequestError

from .conftest import ANSWER, PROBLEM

START = re.compile(r"dInfer \S+ listens on (http://127\.0\.0\.1:[0-9]+) and serves tiny-sdar\n")


class Served:
    """A running server: its address, its log so far."""

    def __init__(self, *options: str, files: int | None = None, **environment: str) -> None:
        """files: open files that the process may have at most."""
        words = [sys.executable, "-m", "dinfer", "serve", "tiny-sdar", "--port", "0"]
        words += ["--device", "cpu", "--dtype", "float32", *options]
        if files is not None:
            words = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *words]
        self.process = subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        )
        assert self.process.stderr is not None
        # Lines of the log, which are JSON, may come before.
        first = next(line for line in self.process.stderr if not line.startswith("{"))
        found = START.fullmatch(first)
        assert found, first
        self.url = found[1]
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log += self.process.stderr

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0)

    def stop(self, sign: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(sign)
        try:
            code = self.process.wait(150)
        finally:
            self.process.kill()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def start(*options: str, **environment: str) -> Served:
        made.append(Served(*options, **environment))
        return made[-1]

    yield start
    for served in made:
        if served.process.poll() is None:
            served.stop()


def test_the_official_client_over_a_socket(serve: Callable[..., Served]) -> None:
    served = serve(DINFER_API_KEYS="sesame")
    with served.client("sesame") as client:
        answer = client.completions.create(model="tiny-sdar", prompt=PROBLEM, max_tokens=64)
        assert answer.choices[0].text == ANSWER
        messages: Any = [{"role": "user", "content": PROBLEM}]
        chunks = client.chat.completions.create(model="tiny-sdar", messages=messages, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny-sdar", prompt=PROBLEM, n=0)
    with served.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert served.stop() == 0
    lines = [json.loads(line) for line in served.log]
    assert [line["status"] for line in lines] == [200, 200, 400, 401]
    assert not any("sesame" in line or "apples" in line for line in served.log)


def test_text_arrives_while_the_answer_is_made(serve: Callable[..., Served]) -> None:
    """The first event is there before the request has ended (its figures say when)."""
    served = serve()
    body = {"prompt": PROBLEM, "max_tokens": 450, "stream": True, "ignore_eos": True}
    body |= {"decoder": "fixed", "cache": "none", "stream_options": {"include_canvas": True}}
    with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, timeout=200) as answer:
        lines = answer.iter_lines()
        seen = [next(lines) for _ in range(6)]
        figures = httpx2.get(f"{served.url}/metrics").text
    assert sum("canvas" in line for line in seen) == 3
    assert 'dinfer_active_requests{model="tiny-sdar"} 1.0' in figures
    # The client has left before the end: the request is gone.
    for _ in range(100):
        figures = httpx2.get(f"{served.url}/metrics").text
        if 'dinfer_pages_used{model="tiny-sdar"} 0.0' in figures:
            break
        time.sleep(0.05)
    assert 'dinfer_active_requests{model="tiny-sdar"} 0.0' in figures
    assert 'dinfer_pages_used{model="tiny-sdar"} 0.0' in figures
    assert "dinfer_requests_total{" not in figures
    assert served.stop(signal.SIGINT) in (0, 130)


@pytest.mark.parametrize("drain", [100, 0])
def test_sigterm_under_load(serve: Callable[..., Served], drain: int) -> None:
    """Every stream in progress ends with its answer, or, where the time is up, with an error."""
    served = serve("--drain", str(drain))
    length = 64 if drain else 450
    body = {"prompt": PROBLEM, "max_tokens": length, "stream": True, "ignore_eos": True}
    body |= {"decoder": "fixed", "cache": "none"}
    begun, texts = threading.Semaphore(0), [""] * 8

    def ask(number: int) -> None:
        with httpx2.stream(
            "POST", f"{served.url}/v1/completions", json=body, timeout=200
        ) as answer:
            for text in answer.iter_text():
                if not texts[number]:
                    begun.release()
                texts[number] += text

    callers = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    for _ in callers:
        assert begun.acquire(timeout=100)
    assert served.stop() == 0
    for caller in callers:
        caller.join(100)
    ends = [text.split("\n\n")[-3:] for text in texts]
    assert all(end[1:] == ["data: [DONE]", ""] for end in ends), ends
    reasons = [json.loads(end[0].removeprefix("data: ")) for end in ends]
    for reason in reasons:
        if "error" in reason:
            assert drain == 0 and reason["error"]["code"] == "closing"
        else:
            assert reason["choices"][0]["finish_reason"] == "length"


def test_the_documentation(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python runs as it is written, and each of its curl calls is answered."""
    served = serve()
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    page = page.replace("http://127.0.0.1:8000", served.url)
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(block, "serving.md", "exec"), scope)
    scope["client"].close()
    said = capsys.readouterr().out
    assert said.startswith(ANSWER) and "provisional: 1 [" in said and "CompletionUsage(" in said
    (shell,) = re.findall(r"```sh\n(curl.*?)```", page, re.DOTALL)
    calls = re.findall(r"curl -s (\S+) .*?-d '(.*?)'\n", shell, re.DOTALL)
    assert len(calls) == shell.count("curl")
    for url, body in calls:
        answer = httpx2.post(url, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text


def test_chat_with_a_server(
    serve: Callable[..., Served],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = serve(DINFER_API_KEYS="sesame")
    words = ["dinfer", "chat", "--server", served.url]

    def chat(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROBLEM}\n\n"))
        with pytest.raises(SystemExit) as caught:
            command()
        out = capsys.readouterr()
        return int(caught.value.code or 0), out.out, out.err

    monkeypatch.setenv("DINFER_API_KEY", "sesame")
    assert chat() == (0, f"{ANSWER}\n", "")
    assert chat("--model", "tiny-sdar") == (0, f"{ANSWER}\n", "")
    code, _, said = chat("--model", "tiny-llada")
    assert code == 2 and said.startswith("Error: The server refuses: Unknown model 'tiny-llada'.")
    monkeypatch.setenv("DINFER_API_KEY", "wrong")
    code, _, said = chat()
    assert code == 2 and "needs an API key" in said
    served.stop()
    code, _, said = chat()
    assert code == 2 and "does not answer" in said and said.count("\n") == 1


def test_benchmarks_of_a_server(
    serve: Callable[..., Served],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same requests give the same answers over HTTP as in process, so the same figures where
    they are no times.
    """
    served = serve(DINFER_API_KEYS="sesame")
    monkeypatch.setenv("DINFER_API_KEY", "sesame")

    def bench(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["dinfer", "bench", *words, "--repeats", "1", "--json"])
        with pytest.raises(SystemExit) as caught:
            command()
        assert not caught.value.code
        return json.loads(capsys.readouterr().out)

    load = ["--num", "5", "--concurrency", "2"]
    over = bench("throughput", *load, "--server", served.url)
    here = bench("throughput", *load, "--device", "cpu", "--dtype", "float32")
    assert over["tokens_per_forward"] == pytest.approx(here["tokens_per_forward"])
    for found in (over, here):
        first, whole = found["seconds_to_first_text"], found["seconds_per_request"]
        assert first["repeats"] == whole["repeats"] == 5
        assert 0 < first["median"] <= whole["median"] and first["p95"] == first["most"]
    fair = bench("fairness", *load, "--long-tokens", "64", "--server", served.url)
    assert fair["server"] == served.url and fair["slowdown_of_long"]["repeats"] == 1
    assert fair["first_text_ratio"] > 0 and 0 < fair["fairness"] <= 1


# The command itself


def refusal(*words: str, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> str:
    patch.setattr(sys, "argv", ["dinfer", "serve", *words])
    with pytest.raises(SystemExit) as caught:
        command()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.count("\n") == 1
    return said


def test_a_port_in_use(
    serve: Callable[..., Served],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = serve().url.rpartition(":")[2]
    said = refusal("--port", port, capsys=capsys, patch=monkeypatch)
    assert said.startswith(f"Error: Cannot listen on 127.0.0.1, port {port}: ")


def test_names_of_models(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    given = ["tiny-sdar", str(folder), f"other={folder}", "owner/name"]
    assert named(given) == {
        "tiny-sdar": "tiny-sdar",
        "mine": str(folder),
        "other": str(folder),
        "owner/name": "owner/name",
    }
    for wrong in (["a", "a"], ["=x"], ["x="]):
        with pytest.raises(RequestError):
            named(wrong)


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert read_keys("zero, three", file) == ("zero", "three", "one", "two")
    assert read_keys(None, None) == ()
    file.write_text("\n")
    for given in ((None, file), ("", None), (None, tmp_path), ("schlüssel", None)):
        with pytest.raises(RequestError):
            read_keys(*given)
