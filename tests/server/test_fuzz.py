"""Whatever comes in: no fault of ours, and everything free afterwards."""

import asyncio
import json
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dinfer import AsyncLLM
from dinfer.server.app import create_app
from dinfer.server.app_state import Settings

from .conftest import assert_idle, drive, post

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/infill", "/tokenize", "/detokenize"]
KNOWN: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny-sdar", "random", "none"]),
    "prompt": st.text(max_size=40) | st.lists(st.integers(0, 400), max_size=9) | st.just(["", "b"]),
    "messages": st.just([{"role": "user", "content": "Add 1 and 2."}]),
    "text": st.sampled_from(["a[BLANK:3]b", "[BLANK:1][BLANK:2]", "no", "[BLANK:0]", "[BLANK]"]),
    "pinned": st.lists(
        st.fixed_dictionaries({"position": st.integers(-1, 9), "content": st.just("x")}), max_size=3
    ),
    "max_tokens": st.integers(1, 40) | st.integers(),
    "temperature": st.floats(0, 2) | st.floats(),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 50),
    "seed": st.integers(0, 9) | st.integers(),
    "n": st.integers(1, 3) | st.integers(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=3),
    "suffix": st.text(max_size=9),
    "echo": st.booleans(),
    "logprobs": st.booleans() | st.integers(-1, 2),
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.just({"include_canvas": True, "include_usage": True}),
    "decoder": st.sampled_from(["fixed", "threshold:threshold=0.3", "factor", "fixed:x=1", "=:"]),
    "cache": st.sampled_from(["none", "dual", "prefix", "block", "vicinity", "vicinity:left=a"]),
    "iteration": st.sampled_from(["sliding", "blockwise:length=3", "blockwise:length=0", "x" * 99]),
    "timeout": st.floats(0.001, 0.05),
    "tokens": st.lists(st.integers(0, 900) | st.integers(), max_size=9),
}  # fmt: skip
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes, int | None]:
    """A path, a body (mostly sensible, with something odd in it), and when the client goes."""
    path = draw(st.sampled_from(PATHS))
    needed = {PATHS[0]: "prompt", PATHS[1]: "messages", PATHS[2]: "text"}.get(path)
    body: Any = draw(st.fixed_dictionaries({}, optional=KNOWN))
    if needed and draw(st.integers(0, 9)):
        body[needed] = draw(KNOWN[needed])
        keep = draw(st.sets(st.sampled_from(sorted(KNOWN)), max_size=6)) | {needed, "stream"}
        body = {name: value for name, value in body.items() if name in keep}
    if not draw(st.integers(0, 4)):
        body[draw(st.sampled_from(sorted(KNOWN)) | st.text(max_size=5))] = draw(JSON)
    raw = json.dumps(body).encode()
    if not draw(st.integers(0, 9)):
        raw = draw(st.binary(max_size=20)) + raw[draw(st.integers(0, 20)) :]
    return path, raw, draw(st.none() | st.integers(0, 6))


def check_calls(app: FastAPI, batch: list[tuple[str, bytes, int | None]]) -> None:
    """Makes the calls at once; each is answered or given up, and the server is as before."""

    async def main() -> list[Any]:
        return await asyncio.gather(*(drive(app, *call) for call in batch))

    for (path, body, leaves), sent in zip(batch, asyncio.run(main()), strict=True):
        if leaves is None:
            assert sent, (path, body)
            assert not sent[-1].get("more_body", False), (path, body)
        if sent:
            assert sent[0]["status"] < 500 and sent[0]["status"] != 422, (path, body, sent)
    assert_idle(app)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(calls(), min_size=1, max_size=5))
def test_bodies_and_disconnects(
    models: dict[str, AsyncLLM], batch: list[tuple[str, bytes, int | None]]
) -> None:
    app = create_app(models, Settings(max_queue=2))
    check_calls(app, batch)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(calls(), min_size=1, max_size=5))
def test_bodies_and_disconnects_at_length(
    models: dict[str, AsyncLLM], batch: list[tuple[str, bytes, int | None]]
) -> None:
    app = create_app(models, Settings(max_queue=2))
    check_calls(app, batch)
    answer = asyncio.run(post(app, "/v1/completions", prompt="x", max_tokens=1))
    assert answer["usage"]["completion_tokens"] <= 1


# The cases are made when the tests are collected, and the models are loaded when they run.
SERVED: dict[str, AsyncLLM] = {}
# A list longer than the document allows may make the body too long: 413 refuses it as well.
REFUSED = {"checks": {"negative_data_rejection": {"expected-statuses": ["4xx"]}}}
DOCUMENT = schemathesis.openapi.from_asgi(
    "/openapi.json", create_app(SERVED), config=schemathesis.Config.from_dict(REFUSED)
)


@pytest.fixture
def served(models: dict[str, AsyncLLM]) -> None:
    SERVED.update(models)


@pytest.mark.usefixtures("served")
@DOCUMENT.parametrize()
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_served_document(case: Any) -> None:
    """No 5xx, nothing the document does not promise. It cannot state every rule (a context's
    length, names of strategies), so a body that fits it may still be refused with 400.
    """
    rules = schemathesis.checks.CHECKS.get_one("positive_data_acceptance")
    case.call_and_validate(excluded_checks=[rules])
