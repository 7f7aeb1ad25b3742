"""Talks to a running server, with what Python brings along."""

import json
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from dinfer.errors import RequestError
from dinfer.request import Output, Stats, TextEvent, Usage

SILENCE = 600
"""Seconds without a byte after which a server counts as gone."""


def chat(server: str, key: str | None, body: dict[str, Any]) -> Iterator[TextEvent]:
    """Settled text of a chat completion as it comes; the last event has the output. Raises
    RequestError with the server's own sentence, or saying that it cannot be reached.
    """
    if not server.startswith(("http://", "https://")):
        raise RequestError(f"The server {server!r} is no address; write http://HOST:PORT.")
    url = server.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    more = {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body | more).encode()
    try:
        with urlopen(Request(url, data, headers), timeout=SILENCE) as answer:
            yield from _events(_chunks(answer))
    except RequestError:
        raise
    except HTTPError as error:
        raise RequestError(f"The server refuses: {_sentence(error)}") from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RequestError(f"The server {server} does not answer: {reason}.") from error


def _chunks(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data:
            chunk: dict[str, Any] = json.loads(data)
            if "error" in chunk:
                raise RequestError(f"The server ended the answer: {chunk['error']['message']}")
            yield chunk
    raise RequestError("The server broke the answer off.")


def _events(chunks: Iterator[dict[str, Any]]) -> Iterator[TextEvent]:
    text, end = "", {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if piece := choice["delta"].get("content"):
                text += piece
                yield TextEvent(chunk["id"], piece)
            if choice["finish_reason"]:
                end = choice
        if usage := chunk.get("usage"):
            yield TextEvent(chunk["id"], "", _output(chunk["id"], text, end, usage))


def _output(name: str, text: str, end: dict[str, Any], usage: dict[str, int]) -> Output:
    cost = end["stats"]
    stats = Stats(
        forward_passes=cost["forward_passes"],
        tokens=round(cost["forward_passes"] * cost["tokens_per_forward"]),
        seconds=cost["seconds"],
        queued_seconds=cost["queued_seconds"],
    )
    counts = Usage(usage["prompt_tokens"], usage["completion_tokens"])
    return Output(name, text, end["token_ids"], end["finish_reason"], counts, stats)


def _sentence(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}."
