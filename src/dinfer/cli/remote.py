"""Talks to a running server, with what Python brings along."""

import json
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from dinfer.errors import RequestError

SILENCE = 600
"""Seconds without a byte after which a server counts as gone."""


def chat(server: str, key: str | None, body: dict[str, Any]) -> Iterator[str]:
    """Settled text of a chat completion as it comes. Raises RequestError with the server's own
    sentence, or saying that it cannot be reached.
    """
    if not server.startswith(("http://", "https://")):
        raise RequestError(f"The server {server!r} is no address; write http://HOST:PORT.")
    url = server.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body | {"stream": True}).encode()
    try:
        with urlopen(Request(url, data, headers), timeout=SILENCE) as answer:
            yield from _pieces(answer)
    except RequestError:
        raise
    except HTTPError as error:
        raise RequestError(f"The server refuses: {_sentence(error)}") from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RequestError(f"The server {server} does not answer: {reason}.") from error


def _pieces(answer: HTTPResponse) -> Iterator[str]:
    for line in answer:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data) if data else {"choices": []}
        if "error" in chunk:
            raise RequestError(f"The server ended the answer: {chunk['error']['message']}")
        yield from (choice["delta"].get("content", "") for choice in chunk["choices"])


def _sentence(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}."
