"""Keys, limits, deadlines, clients that leave, drain, figures, logs."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from dinfer import AsyncLLM
from dinfer.server.log import JsonLines

from .conftest import PROBLEM, assert_idle, client, data_of, drive, flush, go, http, post, refused

LONG: Any = {"model": "random", "prompt": "ab", "max_tokens": 100, "decoder": "fixed"}
BODY = json.dumps(LONG | {"ignore_eos": True}).encode()
STREAM = json.dumps(LONG | {"ignore_eos": True, "stream": True}).encode()


async def inside(app: FastAPI, count: int) -> None:
    """Waits until that many calls are in the gate."""
    while app.state.site.gate.calls < count:
        await asyncio.sleep(0.001)


# Keys and bodies


def test_api_keys(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(keys=("first", "second"))

    async def main() -> dict[str, int]:
        asked = {}
        for header in (
            "Bearer first",
            "bearer second",
            "Bearer third",
            "Bearer",
            "first",
            "Bearer é",
        ):
            async with http(app) as one:
                answer = await one.get(
                    "/v1/models", headers=[(b"authorization", header.encode("latin-1"))]
                )
                asked[header] = answer.status_code
                if answer.status_code == 401:
                    assert answer.headers["www-authenticate"] == "Bearer"
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert "first" not in answer.text.replace(header, "")
        async with http(app) as one:
            for path in ("/v1/models", "/metrics", "/v1/strategies"):
                assert (await one.get(path)).status_code == 401
            for path in ("/health", "/ready", "/", "/page/page.js"):
                assert (await one.get(path)).status_code == 200
        return asked

    found = go(main())
    assert [status == 200 for status in found.values()] == [True, True, False, False, False, False]
    assert "first" not in repr(app.state.site.settings)

    async def listed() -> list[Any]:
        return (await client(app, "second").models.list()).data

    assert go(listed())


def test_bodies_are_limited(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(max_body=1000)

    async def main() -> tuple[Any, Any]:
        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        async with http(app) as one:
            told = await one.post("/v1/completions", json={"prompt": "x" * 1000})
            head = {"content-type": "application/json"}
            untold = await one.post("/v1/completions", content=pieces(), headers=head)
            return told, untold

    for answer in go(main()):
        assert answer.status_code == 413
        assert "1000 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"nul",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "x"}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100000,
        b'{"prompt": "x", "stop": ["\\ud800"]}',
        b'{"prompt": "x", "decoder": "\\ud800"}',
        b'{"prompt": "x", "model": "\\udfff"}',
        b'{"prompt": "x", "max_tokens": "5"}',
        b'{"prompt": "x", "max_tokens": true}',
        b'{"prompt": [true]}',
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": "x", "decoder": "threshold:threshold=nan"}',
        b'{"prompt": "x", "iteration": "blockwise:length=' + b"9" * 900 + b'", "stop": [""]}',
    ],
)
def test_odd_bodies_are_client_errors(app: FastAPI, body: bytes) -> None:
    start, *rest = go(drive(app, "/v1/completions", body))
    assert start["status"] in (400, 404), rest
    error = json.loads(rest[0]["body"])["error"]
    assert error["message"] and error["type"] == "invalid_request_error"


def test_unknown_paths_and_methods(app: FastAPI) -> None:
    async def main() -> list[Any]:
        async with http(app) as one:
            return [await one.get(p) for p in ("/v1/nothing", "/v1/completions", "/page/../x")]

    found = go(main())
    assert [a.status_code for a in found] == [404, 405, 404]
    assert all(set(a.json()) == {"error"} for a in found)


# Limits


def test_tokens_per_request(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(max_request=50)
    go(post(app, "/v1/completions", model="random", prompt="a" * 40, max_tokens=10))
    status, error = go(
        refused(app, "/v1/completions", model="random", prompt="a" * 41, max_tokens=10)
    )
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_full_queue_says_when_to_come_back(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(max_queue=2)  # and 4 that run

    async def main() -> tuple[list[int], dict[bytes, bytes], Any]:
        calls = [asyncio.create_task(drive(app, "/v1/completions", BODY)) for _ in range(9)]
        done = await asyncio.gather(*calls)
        late = next(m for m in done if m[0]["status"] == 429)
        return [m[0]["status"] for m in done], dict(late[0]["headers"]), json.loads(late[1]["body"])

    statuses, headers, body = go(main())
    assert sorted(statuses) == [200] * 6 + [429] * 3
    assert int(headers[b"retry-after"]) >= 1
    assert body["error"]["code"] == "queue_full"
    go(post(app, "/v1/completions", **LONG))


def test_other_models_do_not_mind_a_full_queue(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(max_queue=0)

    async def main() -> None:
        busy = [asyncio.create_task(drive(app, "/v1/completions", BODY)) for _ in range(4)]
        await inside(app, 4)
        await post(app, "/v1/completions", model="tiny-sdar", prompt="x", max_tokens=4)
        await asyncio.gather(*busy)

    go(main())


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("by", ["server", "caller"])
def test_deadlines(make_app: Callable[..., FastAPI], body: bytes, by: str) -> None:
    app = make_app(deadline=0.03 if by == "server" else None)
    if by == "caller":
        body = json.dumps(json.loads(body) | {"timeout": 0.03}).encode()
    start, *rest = go(drive(app, "/v1/completions", body))
    if body.find(b'"stream"') < 0:
        assert start["status"] == 408
        assert json.loads(rest[0]["body"])["error"]["code"] == "deadline"
    else:
        *_, error, done = data_of([start, *rest])
        assert error["error"]["code"] == "deadline" and done == "[DONE]"
        assert rest[-1].get("more_body", False) is False


# Clients that leave


@pytest.mark.parametrize("leave_after", [0, 1, 2, 5])
def test_a_client_that_leaves_frees_its_request(
    app: FastAPI, models: dict[str, AsyncLLM], leave_after: int
) -> None:
    go(drive(app, "/v1/completions", STREAM, leave_after))
    assert_idle(app)
    steps = models["random"].engine.scheduler
    assert not steps.running and not steps.waiting


def test_a_client_that_leaves_without_a_stream(app: FastAPI) -> None:
    assert go(drive(app, "/v1/completions", BODY, leave_after=0)) == []
    assert_idle(app)


def test_it_is_gone_after_one_step(app: FastAPI, models: dict[str, AsyncLLM]) -> None:
    """Of the steps that the answer needs, hardly any are run once the client is gone."""
    llm, steps = models["random"], []
    real = llm.engine.step
    llm.engine.step = lambda: steps.append(1) or real()  # type: ignore[method-assign,func-returns-value]
    try:
        sent = go(drive(app, "/v1/completions", STREAM, leave_after=4))
        flush(llm)
        known = len(steps)
        time.sleep(0.1)
    finally:
        llm.engine.step = real  # type: ignore[method-assign]
    assert known == len(steps) < 100
    assert data_of(sent)[-1] != "[DONE]"


# Drain


def test_drain_finishes_calls_and_takes_no_more(make_app: Callable[..., FastAPI]) -> None:
    app = make_app()

    async def main() -> tuple[Any, Any, int, Any]:
        running = asyncio.create_task(drive(app, "/v1/completions", STREAM))
        await inside(app, 1)
        app.state.site.gate.drain(30)
        late = await refused(app, "/v1/completions", model="random", prompt="x")
        async with http(app) as one:
            ready = await one.get("/ready")
            health = await one.get("/health")
        return await running, late, ready.status_code, health.status_code

    messages, late, ready, health = go(main())
    *events, done = data_of(messages)
    assert done == "[DONE]" and events[-1]["choices"][0]["finish_reason"] == "length"
    assert (late[0], late[1]["code"]) == (503, "closing")
    assert (ready, health) == (503, 200)


def test_drain_ends_what_is_too_slow(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(deadline=1000)

    async def main() -> list[Any]:
        calls = [asyncio.create_task(drive(app, "/v1/completions", b)) for b in (BODY, STREAM) * 4]
        await inside(app, 8)
        app.state.site.gate.drain(0.01)
        with anyio.fail_after(60):
            return await asyncio.gather(*calls)

    for messages in go(main()):
        if messages[0]["status"] == 503:
            assert json.loads(messages[1]["body"])["error"]["code"] == "closing"
        else:
            *_, error, done = data_of(messages)
            assert error["error"]["code"] == "closing" and done == "[DONE]"


# Faults of ours


def test_a_fault_is_one_callers_500_and_the_server_goes_on(
    app: FastAPI, models: dict[str, AsyncLLM], caplog: pytest.LogCaptureFixture
) -> None:
    engine = models["random"].engine
    real = engine.step

    def broken() -> Any:
        engine.step = real  # type: ignore[method-assign]
        raise RuntimeError("no such luck")

    for body in (BODY, STREAM):
        engine.step = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError) if body is BODY else _nothing():
            go(drive(app, "/v1/completions", body))
        if body is STREAM:
            assert "no such luck" in caplog.text
        assert_idle(app)
    go(post(app, "/v1/completions", **LONG))


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_the_500_does_not_say_why(app: FastAPI, models: dict[str, AsyncLLM]) -> None:
    engine = models["random"].engine
    real = engine.step

    def broken() -> Any:
        engine.step = real  # type: ignore[method-assign]
        raise RuntimeError("secret")

    engine.step = broken  # type: ignore[method-assign]
    status, error = go(refused(app, "/v1/completions", **LONG))
    assert (status, error["type"]) == (500, "server_error")
    assert "secret" not in json.dumps(error)


# Figures and logs


def figures(app: FastAPI) -> dict[tuple[str, ...], float]:
    async def main() -> str:
        async with http(app) as one:
            return (await one.get("/metrics")).text

    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "le")): sample.value
        for family in text_string_to_metric_families(go(main()))
        for sample in family.samples
    }


def test_figures(app: FastAPI) -> None:
    answer = go(post(app, "/v1/completions", prompt=PROBLEM, max_tokens=64, n=2))
    go(refused(app, "/v1/completions", prompt=5))
    found = figures(app)
    assert found["dinfer_requests_total", "tiny-sdar", "stop"] == 2
    assert found["dinfer_calls_total", "/v1/completions", "200"] == 1
    assert found["dinfer_calls_total", "/v1/completions", "400"] == 1
    usage = answer["usage"]
    assert found["dinfer_tokens_total", "answer", "tiny-sdar"] == usage["completion_tokens"]
    forwards = sum(c["stats"]["forward_passes"] for c in answer["choices"])
    assert found["dinfer_tokens_per_forward_count", "tiny-sdar"] == 2
    assert found["dinfer_first_settled_seconds_count", "tiny-sdar"] == 2
    rows = [found["dinfer_rows_total", kind, "tiny-sdar"] for kind in ("run", "saved")]
    assert sum(rows) == forwards * (usage["prompt_tokens"] + 64) and min(rows) > 0
    assert found["dinfer_pages_used", "random"] == 0 < found["dinfer_pages", "random"]
    assert found["dinfer_active_requests", "tiny-sdar"] == 0


def test_two_applications_count_apart(make_app: Callable[..., FastAPI]) -> None:
    one, other = make_app(), make_app()
    go(post(one, "/v1/completions", prompt="x", max_tokens=2, ignore_eos=True))
    assert ("dinfer_requests_total", "tiny-sdar", "length") in figures(one)
    assert ("dinfer_requests_total", "tiny-sdar", "length") not in figures(other)


def test_logs_tell_what_it_cost_and_not_what_was_said(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dinfer.server")
    go(post(app, "/v1/completions", prompt=PROBLEM, max_tokens=64))
    go(refused(app, "/v1/completions", prompt=PROBLEM, decoder="nonsense"))
    go(drive(app, "/v1/completions", STREAM, leave_after=3))
    lines = [JsonLines().format(record) for record in caplog.records]
    found = [json.loads(line) for line in lines]
    assert [line["status"] for line in found] == [200, 400, 499]
    assert found[0]["tokens"] == 19 and found[0]["forwards"] > 1
    assert found[0]["path"] == "/v1/completions" and found[0]["model"] == "tiny-sdar"
    assert not any(word in line for line in lines for word in ("Tom", "apples", "nonsense"))
