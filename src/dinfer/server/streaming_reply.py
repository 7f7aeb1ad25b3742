"""One call's requests through the engine: admitted, watched, ended in time, told to the client."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dinfer.engine.engine import Event
from dinfer.request import CanvasEvent, Output
from dinfer.server.api_error import APIError, broken
from dinfer.server.app_state import AppState
from dinfer.server.formatter import Chunk, ResponseFormatter

log = logging.getLogger("dinfer.server")
CLIENT_LEFT = 499
"""Status in the log of a call whose client went away."""
KEEP_ALIVE = 15.0
"""Seconds between comments in a stream: proxies cut connections that are silent for long."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
]


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream` its chunks, each an event's data, then [DONE].",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "properties": {"data": {"type": "string"}},
                    "required": ["data"],
                }
            }
        },
    }
}
"""What the document says of an answer beside its JSON form."""


class StreamingReply(Response):
    """Does its work when it is sent: so a refusal of the gate can still become a status, and a
    client that goes away, a deadline or a drain ends the engine's work within a step.
    """

    def __init__(self, site: AppState, form: ResponseFormatter) -> None:
        self.site, self.form, self.background = site, form, None
        self._outputs: dict[str, Output] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        form, gate = self.form, self.site.gate
        note = scope.setdefault("dinfer.note", {})
        # Who has a key of their own cannot learn from timing what others asked.
        salt = scope.get("dinfer.salt", "")
        form.requests = [replace(request, cache_salt=salt) for request in form.requests]
        note |= {"call": form.id, "model": form.model, "requests": len(form.requests)}
        left = asyncio.Event()
        room = self.site.room(form.llm)
        with gate.hold(form.model, len(form.requests), room, form.body.timeout) as limit:
            watch = asyncio.create_task(_watch(receive, limit, left))
            try:
                await (self._stream(send) if form.body.stream else self._whole(scope, send))
            finally:
                watch.cancel()
        if left.is_set():
            note["status"] = CLIENT_LEFT
        elif limit.cancelled_caught:
            note["status"] = gate.overdue().status
            await self._give_up(gate.overdue(), scope, receive, send)
        done = list(self._outputs.values())
        note["tokens"] = sum(output.stats.tokens for output in done)
        note["forwards"] = sum(output.stats.forward_passes for output in done)

    async def _whole(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        body = self.form.whole(self._in_order()).model_dump_json()
        await Response(body, media_type="application/json")(scope, _never, send)

    async def _stream(self, send: Send) -> None:
        form = self.form
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        for chunk in form.opening():
            await send(_line(chunk))
        if form.body.wants_canvas:
            for index in range(len(form.requests)):
                await send(_line(form.blank_canvas(index)))
        beat = asyncio.create_task(_keep_alive(send))
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    for chunk in self._chunks(event):
                        await send(_line(chunk))
        except Exception:
            log.exception("the engine failed on a stream")
            await send(_line(broken().body))
        else:
            if form.body.wants_usage:
                usage = form.usage(self._in_order()).model_dump()
                await send(_line(form.chunk([], usage=usage)))
        finally:
            beat.cancel()
        await send(_end())

    def _chunks(self, event: Event) -> list[Chunk]:
        form, index = self.form, self._places[event.id]
        if isinstance(event, CanvasEvent):
            return [form.canvas(index, event)] if form.body.wants_canvas else []
        chunks = [form.text(index, event.text)] if event.text else []
        return chunks + ([form.end(index, event.output)] if event.output else [])

    async def _events(self) -> AsyncGenerator[Event]:
        """The engine's events, counted on their way."""
        form, metrics, began = self.form, self.site.metrics, time.perf_counter()
        self._places = {request.id: place for place, request in enumerate(form.requests)}
        silent = set(self._places)
        async with aclosing(form.llm.serve(*form.requests)) as events:
            async for event in events:
                if not isinstance(event, CanvasEvent):
                    if event.id in silent and event.text:
                        silent.discard(event.id)
                        metrics.first.labels(form.model).observe(time.perf_counter() - began)
                    if event.output is not None:
                        self._outputs[event.id] = event.output
                        request = form.requests[self._places[event.id]]
                        metrics.finished(form.model, request, event.output)
                yield event

    def _in_order(self) -> list[Output]:
        return [self._outputs[request.id] for request in self.form.requests]

    async def _give_up(self, why: APIError, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream ends with an error event; what did not begin yet, with a status."""
        if self.form.body.stream:
            await send(_line(why.body))
            await send(_end())
        else:
            await why.response()(scope, receive, send)


async def _watch(receive: Receive, limit: anyio.CancelScope, left: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left.set()
    limit.cancel()


async def _keep_alive(send: Send) -> None:
    while True:
        await asyncio.sleep(KEEP_ALIVE)
        await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})


async def _never() -> dict[str, str]:
    """A `receive` for a response that has no use for it."""
    raise AssertionError("nothing more is read")


def _line(data: object) -> dict[str, object]:
    text = f"data: {json.dumps(data, allow_nan=False)}\n\n".encode()
    return {"type": "http.response.body", "body": text, "more_body": True}


def _end() -> dict[str, object]:
    return {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
