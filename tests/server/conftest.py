"""A server over a bundled and a random model, in process, and the clients that talk to it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI

from dinfer import LLM, AsyncLLM
from dinfer.server.app import create_app
from dinfer.server.app_state import Settings

from ..cli.test_commands import with_tokenizer

PROBLEM = "Tom has 12 apples. Then he buys 7 more. How many apples does Tom have now?"
ANSWER = "Add 7: 12+7=19.\n#### 19"


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncLLM]]:
    """tiny-sdar, and a random LLaDA that knows bytes and is no chat_only model."""
    folder = with_tokenizer("llada", tmp_path_factory.mktemp("served"))
    options: Any = {"dtype": "float32", "device": "cpu", "max_rows": None}  # as `serve` does
    made = {
        "tiny-sdar": AsyncLLM("tiny-sdar", max_sequences=8, **options),
        "random": AsyncLLM(str(folder), max_sequences=4, **options),
    }
    yield made
    for llm in made.values():
        llm.close()


@pytest.fixture(scope="package")
def offline(models: dict[str, AsyncLLM]) -> dict[str, LLM]:
    """The same models without a server."""
    return {name: LLM(str(llm.loaded.folder), "float32", "cpu") for name, llm in models.items()}


@pytest.fixture
def make_app(models: dict[str, AsyncLLM]) -> Iterator[Callable[..., FastAPI]]:
    """An application with settings; whatever the test did, its engines must be empty after it."""
    made: list[FastAPI] = []

    def make(**settings: Any) -> FastAPI:
        made.append(create_app(models, Settings(**settings)))
        return made[-1]

    yield make
    for app in made:
        assert_idle(app)


@pytest.fixture
def app(make_app: Callable[..., FastAPI]) -> FastAPI:
    return make_app()


def assert_idle(app: FastAPI) -> None:
    """No request, no page, nobody in the gate."""
    site = app.state.site
    assert site.gate.calls == 0
    for name, llm in site.models.items():
        flush(llm)
        assert site.gate.inside(name) == 0
        assert llm.alive and not llm.engine.busy
        assert llm.engine.pool.free == llm.engine.pool.pages
        assert not llm._thread._listeners


def flush(llm: AsyncLLM) -> None:
    """Returns when the engine's thread has carried out every command given so far."""
    import threading

    done = threading.Event()
    llm._thread._commands.put(done.set)
    assert done.wait(30)


def http(app: FastAPI, **headers: str) -> httpx2.AsyncClient:
    """A client without a socket."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://test", headers=headers)


def client(app: FastAPI, key: str = "none") -> openai.AsyncOpenAI:
    """The official client without a socket."""
    url = "http://test/v1"
    return openai.AsyncOpenAI(api_key=key, base_url=url, http_client=http(app), max_retries=0)


def go(work: Awaitable[Any]) -> Any:
    """Runs a coroutine to its end."""
    return asyncio.run(work)  # type: ignore[arg-type]


async def post(app: FastAPI, path: str, **body: Any) -> Any:
    """The answer to a body, which must be 200."""
    async with http(app) as one:
        answer = await one.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def refused(app: FastAPI, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a body that must be refused, in OpenAI's shape."""
    async with http(app) as one:
        answer = await one.post(path, content=json.dumps(body), headers={"content-type": JSON})
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return answer.status_code, error


JSON = "application/json"


async def drive(
    app: FastAPI, path: str, body: bytes, leave_after: int | None = None
) -> list[dict[str, Any]]:
    """What an app sends for a POST, as a real server would call it; the client goes away once it
    got that many messages.
    """
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    if leave_after == 0:
        gone.set()

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        sent.append(message)
        if leave_after is not None and len(sent) >= leave_after:
            gone.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", JSON.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    await app(scope, receive, send)
    return sent


def data_of(messages: list[dict[str, Any]]) -> list[Any]:
    """The events of a stream."""
    text = b"".join(m.get("body", b"") for m in messages).decode()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
