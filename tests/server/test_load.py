"""Many clients at once, of every kind: each answer is that of the offline LLM, and nothing is lost.

The full form: scripts/test -m slow tests/server/test_load.py
"""

import asyncio
import json
import os
import random
from typing import Any

import pytest
from fastapi import FastAPI

from dinfer import LLM, AsyncLLM, SamplingParams
from dinfer.server.app import create_app
from dinfer.server.app_state import Settings

from .conftest import PROBLEM, assert_idle, data_of, drive

SPECS = [
    {},
    {"decoder": "fixed:steps=4"},
    {"decoder": "threshold:threshold=0.4", "temperature": 1.0},
    {"iteration": "sliding:length=16:stride=4", "temperature": 0.7, "top_p": 0.9},
    {"stop": "1"},
]
PROMPTS = [PROBLEM, "Ann has 3 pens. Then she buys 5 more.", "x", "12+7=", "ä🙂" * 20]


def asked(number: int) -> dict[str, Any]:
    """The call of a number, always the same."""
    draw = random.Random(number)
    body = {"model": draw.choice(["tiny-sdar", "random"]), "prompt": draw.choice(PROMPTS)}
    return body | {"max_tokens": draw.randint(1, 40), "seed": number % 7} | draw.choice(SPECS)


def expected(offline: dict[str, LLM], body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason without a server."""
    fields = {k: v for k, v in body.items() if k not in ("model", "prompt")}
    (out,) = offline[body["model"]].generate(body["prompt"], SamplingParams(**fields))
    return out.text, out.finish_reason


async def call(app: FastAPI, number: int) -> tuple[str, str] | None:
    """The answer to call `number`; None where the client left or the body was bad."""
    draw = random.Random(-number - 1)
    kind = draw.choices(["whole", "stream", "leaves", "bad"], [4, 4, 1, 1])[0]
    body = asked(number) | {"stream": kind in ("stream", "leaves")}
    if kind == "bad":
        wrong = draw.choice([{"top_p": 2}, {"decoder": "no"}, {"what": 1}, {"max_tokens": 10**6}])
        (start, _) = await drive(app, "/v1/completions", json.dumps(body | wrong).encode())
        assert start["status"] == 400
        return None
    leaves = draw.randint(0, 3) if kind == "leaves" else None
    sent = await drive(app, "/v1/completions", json.dumps(body).encode(), leaves)
    if kind == "leaves":
        return None
    assert sent[0]["status"] == 200
    if kind == "whole":
        (choice,) = json.loads(sent[1]["body"])["choices"]
        return choice["text"], choice["finish_reason"]
    *chunks, done = data_of(sent)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


async def clients(app: FastAPI, count: int, calls: range) -> dict[int, tuple[str, str]]:
    """Answers by number; `count` clients take the calls one after the other."""
    waiting, found = iter(calls), {}

    async def client() -> None:
        for number in waiting:
            answer = await call(app, number)
            if answer is not None:
                found[number] = answer

    await asyncio.gather(*(client() for _ in range(count)))
    return found


def resident() -> int:
    """Pages of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("count", "calls"),
    [(12, 60), pytest.param(64, 2000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_every_answer_is_the_offline_one(
    models: dict[str, AsyncLLM], offline: dict[str, LLM], count: int, calls: int
) -> None:
    app = create_app(models, Settings())
    asyncio.run(clients(app, count, range(calls // 10)))  # memory that is taken once
    before = resident()
    found = asyncio.run(clients(app, count, range(calls)))
    after = resident()
    assert_idle(app)
    assert len(found) > calls / 2
    for number, answer in found.items():
        assert answer == expected(offline, asked(number)), number
    if calls >= 1000:
        assert after < 1.05 * before
