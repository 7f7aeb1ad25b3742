"""Batches of word problems, and a caller that answers without a model."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dinfer.batch.line import Reply
from dinfer.batch.run import Batch

Body = dict[str, Any]


def asked(custom_id: str, url: str = "/v1/completions", **body: Any) -> Body:
    """A line of a batch."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def problem(number: int) -> Body:
    """A line with a word problem; the seed makes its answer the same each time."""
    text = f"Tom has {number} apples. Then he buys 7 more. How many apples does Tom have now?"
    return asked(f"p{number}", prompt=text, max_tokens=32, seed=number)


def write(path: Path, lines: list[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[Body]:
    """Its lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(found: Body) -> Any:
    """What a result says, without what differs from call to call."""
    if found["response"] is None:
        return found["custom_id"], found["error"]
    body = dict(found["response"]["body"])
    for name in ("id", "created"):
        body.pop(name, None)
    for choice in body.get("choices", ()):
        choice.get("stats", {}).pop("seconds", None)
        choice.get("stats", {}).pop("queued_seconds", None)
    return found["custom_id"], found["response"]["status_code"], body


async def echo(url: str, body: bytes) -> Reply:
    """Answers with what it was asked, after a while that the body may choose."""
    given = json.loads(body)
    for _ in range(given.get("turns") or 0):
        await asyncio.sleep(0)
    return Reply(200, "r", json.dumps({"echo": given, "usage": {"completion_tokens": 1}}).encode())


@pytest.fixture
def run() -> Callable[..., list[Body]]:
    """Runs a batch to its end with a caller; the results that this run wrote."""

    def call(given: Path, out: Path, caller: Any = echo, window: int = 4, **kw: Any) -> list[Body]:
        shown: list[Body] = []
        with Batch.open(given, out, **kw) as work:
            if work.results is not None:
                asyncio.run(work.run(caller, window, shown.extend))
        return shown

    return call
