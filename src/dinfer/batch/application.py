"""Calls of the server's own application without a socket, so that a batch gives its answers."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from typing import Any

from starlette.types import Message

from dinfer.batch.line import Reply
from dinfer.batch.run import Call
from dinfer.engine.async_llm import AsyncLLM
from dinfer.errors import EngineError
from dinfer.server.app import create_app
from dinfer.server.app_state import Settings
from dinfer.server.schemas import MOST_CHOICES

_NO_LIMIT = 2**31


class Application:
    """The server over running models, called in process. It refuses nobody for want of room: who
    calls sees to that.
    """

    def __init__(self, models: Mapping[str, AsyncLLM]) -> None:
        settings = Settings(
            max_body=_NO_LIMIT,
            max_queue=_NO_LIMIT,
            max_choices=MOST_CHOICES,
            deadline=None,
            receive_timeout=None,
        )
        self._models = models
        self._app = create_app(models, settings)

    async def call(self, url: str, body: bytes) -> Reply:
        """The answer to a POST. Raises EngineError where an engine has stopped, since then the
        line is not at fault.
        """
        sent: list[Message] = []
        asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await asyncio.Event().wait()  # this client stays
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(_scope(url), receive, send)
        if not all(llm.alive for llm in self._models.values()):
            raise EngineError("The engine has stopped.")
        headers = dict(sent[0]["headers"])
        return Reply(
            sent[0]["status"],
            headers[b"x-request-id"].decode(),
            b"".join(message.get("body", b"") for message in sent[1:]),
        )


@asynccontextmanager
async def engine(name: str, source: str, options: dict[str, Any]) -> AsyncIterator[Call]:
    """An engine in this process, and the way to call it. options: of AsyncLLM."""
    with closing(AsyncLLM(source, **options)) as llm:
        yield Application({name: llm}).call


def _scope(url: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
