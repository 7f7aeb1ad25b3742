"""Calls meant to harm other callers: each is refused or bounded, and afterwards 52 ordinary calls
get the tokens of the offline `LLM` and the pool is empty.
"""

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError

from dinfer import LLM, AsyncLLM, SamplingParams
from dinfer.cli.serve import allowed_hosts, read_keys
from dinfer.errors import RequestError
from dinfer.request import Request
from dinfer.server.app import create_app
from dinfer.server.app_state import LONG_BODY, Settings
from dinfer.server.chat import ChatBody
from dinfer.server.completion import CompletionBody
from dinfer.server.infill import InfillBody
from dinfer.server.tokens import DetokenizeBody

from ..attack import ORDINARY
from .conftest import assert_idle, drive, go, http, post, refused
from .test_socket import Served

MANY = 300_000
"""Items of a list in a body of about 1 MB."""


@pytest.fixture(scope="package")
def expected(offline: dict[str, LLM]) -> list[list[int]]:
    """What a fresh engine answers to the ordinary calls."""
    params = [_params(i) for i in range(ORDINARY)]
    outputs = offline["random"].generate([_prompt(i) for i in range(ORDINARY)], params)
    return [output.token_ids for output in outputs]


def _prompt(number: int) -> str:
    return "The same beginning. "[: 3 + number % 17] + str(number)


def _params(number: int) -> SamplingParams:
    temperature = 0.8 * (number % 2)
    return SamplingParams(max_tokens=1 + number % 9, temperature=temperature, seed=number)


async def _ordinary(app: FastAPI) -> list[list[int]]:
    calls = []
    for number in range(ORDINARY):
        params = _params(number)
        body = {"model": "random", "prompt": _prompt(number), "max_tokens": params.max_tokens}
        body |= {"temperature": params.temperature, "seed": params.seed}
        calls.append(post(app, "/v1/completions", **body))
    return [answer["choices"][0]["token_ids"] for answer in await asyncio.gather(*calls)]


@pytest.fixture
def attacked(app: FastAPI, expected: list[list[int]]) -> Any:
    """The application under attack."""
    yield app
    assert go(_ordinary(app)) == expected
    assert_idle(app)


# Bodies


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (CompletionBody, {"prompt": [{}] * MANY}),
        (CompletionBody, {"prompt": [[{}]] * MANY}),
        (CompletionBody, {"prompt": [[1]] * MANY}),
        (CompletionBody, {"prompt": ["x"] * MANY}),
        (CompletionBody, {"prompt": "x", "stop": [1] * MANY}),
        (CompletionBody, {"prompt": "x", "logit_bias": {str(i): {} for i in range(MANY)}}),
        (CompletionBody, {"prompt": "x"} | {str(i): {} for i in range(MANY)}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatBody, {"messages": [{"role": "user"} | {str(i): {} for i in range(MANY)}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}], "tools": [1] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "tool_calls": [1] * MANY}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}], "modalities": [1] * MANY}),
        (InfillBody, {"pinned": [{}] * MANY, "max_tokens": 5}),
        (InfillBody, {"pinned": [{"position": 0, "content": [{}] * MANY}], "max_tokens": 5}),
        (DetokenizeBody, {"tokens": [{}] * MANY}),
    ],
)
def test_a_body_with_many_wrong_items_makes_few_errors(
    body: type[BaseModel], given: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate(given)
    assert caught.value.error_count() <= 12


def test_the_schemas_bound_every_list() -> None:
    """A list of a body that has neither a bound nor `fail_fast` would be the next fault."""
    from pydantic.fields import FieldInfo

    bodies = (CompletionBody, ChatBody, InfillBody, DetokenizeBody)
    fields: list[tuple[str, FieldInfo]] = [
        (f"{body.__name__}.{name}", field)
        for body in bodies
        for name, field in body.model_fields.items()
    ]
    for name, field in fields:
        text = str(field.annotation) + str(field.metadata)
        if "list[" in text.lower():
            assert "fail_fast" in text.lower() or "FailFast" in text, name


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "x", "f" * 500_000: 1},
        {"prompt": "x", "model": "m" * 500_000},
        {"prompt": "x", "decoder": "d" * 500_000},
        {"prompt": "x", "decoder": "d" * 900},
        {"prompt": "x", "stop": ["s"] * 65},
    ],
)
def test_a_refusal_does_not_repeat_what_was_sent_at_length(
    attacked: FastAPI, given: dict[str, Any]
) -> None:
    status, error = go(refused(attacked, "/v1/completions", **given))
    assert status in (400, 404)
    assert len(json.dumps(error)) < 5000


@pytest.mark.parametrize(
    "decoder",
    [
        f"klass:steps={10**21}",
        f"wino:most={10**21}",
        f"localleap:radius={10**24}",
        "dream:noise=0." + "0" * 39 + "1",
        "edit:threshold=0:edit=0:rounds=1000000000",
        "localleap:radius=2000000000",
    ],
)
def test_options_out_of_range_are_refused(attacked: FastAPI, decoder: str) -> None:
    body = {"model": "random", "prompt": "x", "max_tokens": 2, "decoder": decoder}
    status, error = go(refused(attacked, "/v1/completions", **body))
    assert (status, error["param"]) == (400, "decoder")


def test_answers_of_one_call_are_bounded(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(max_choices=4)
    for body in ({"prompt": "x", "n": 5}, {"prompt": ["x"] * 3, "n": 2}):
        status, error = go(refused(app, "/v1/completions", model="random", **body))
        assert (status, error["code"]) == (400, "too_many_answers")
    answer = go(post(app, "/v1/completions", model="random", prompt="x", n=4, max_tokens=2))
    assert len(answer["choices"]) == 4


# Long prompts


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "1" * 900_000}, "prompt"),
        ("/v1/completions", {"prompt": "x", "suffix": "1" * 900_000}, "suffix"),
        ("/v1/chat/completions", {"messages": "1" * 900_000}, "messages"),
        ("/v1/infill", {"text": "1" * 900_000 + "[BLANK:2]"}, "text"),
        ("/v1/infill", {"text": "[BLANK:2]", "prompt": "1" * 900_000}, "text"),
        ("/v1/infill", {"pinned": "1" * 900_000, "max_tokens": 9}, "pinned"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    attacked: FastAPI,
    models: dict[str, AsyncLLM],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    param: str,
) -> None:
    if "messages" in body:
        body = {"messages": [{"role": "user", "content": body["messages"]}]}
    if "pinned" in body:
        body = body | {"pinned": [{"position": 0, "content": body["pinned"]}]}
    model = "tiny-sdar" if "messages" in body else "random"
    tokenizer = models[model].prompts.tokenizer
    lengths: list[int] = []
    encode = tokenizer.encode

    def watched(text: str, special: bool = False) -> list[int]:
        lengths.append(len(text))
        return encode(text, special)

    monkeypatch.setattr(tokenizer, "encode", watched)
    status, error = go(refused(attacked, path, model=model, **body))
    monkeypatch.undo()
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param
    assert max(lengths, default=0) < 1000


def test_too_long_names_the_field_that_can_mend_it(app: FastAPI) -> None:
    context = 512
    message = [{"role": "user", "content": "word " * 600}]
    short = [{"role": "user", "content": "x"}]
    for path, body, param in (
        ("/v1/completions", {"prompt": [9] * (context + 1)}, "prompt"),
        ("/v1/completions", {"prompt": [9], "max_tokens": context}, "max_tokens"),
        ("/v1/chat/completions", {"messages": message}, "messages"),
        ("/v1/chat/completions", {"messages": short, "max_tokens": 10_000}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": short, "max_completion_tokens": 10_000},
            "max_completion_tokens",
        ),
    ):
        status, error = go(refused(app, path, **body))
        assert (status, error["code"]) == (400, "context_length_exceeded"), body
        assert error["param"] == param


def test_long_prompts_wait_for_each_other_and_others_do_not(
    attacked: FastAPI, models: dict[str, AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one long prompt is read, the server answers; a second long one is not read yet."""
    begun, go_on, reading = threading.Semaphore(0), threading.Event(), []
    tokenizer = models["random"].prompts.tokenizer
    encode = tokenizer.encode

    def slow(text: str, special: bool = False) -> list[int]:
        if len(text) > LONG_BODY:
            reading.append(text[0])
            begun.release()
            assert go_on.wait(60)
        return encode(text, special)

    monkeypatch.setattr(tokenizer, "encode", slow)

    async def main() -> None:
        ask = {"model": "random"}
        long = [
            asyncio.create_task(post(attacked, "/tokenize", prompt=c * (LONG_BODY + 1), **ask))
            for c in "ab"
        ]
        await asyncio.to_thread(begun.acquire)
        async with http(attacked) as one:
            assert (await one.get("/health")).status_code == 200
        await post(attacked, "/v1/completions", prompt="x", max_tokens=2, **ask)
        assert len(reading) == 1 and not any(task.done() for task in long)
        go_on.set()
        await asyncio.gather(*long)
        assert sorted(reading) == ["a", "b"]

    try:
        go(main())
    finally:
        go_on.set()


def test_a_long_text_has_the_ids_of_its_pieces(models: dict[str, AsyncLLM]) -> None:
    """Long texts go another way through the library."""
    tokenizer = models["tiny-sdar"].prompts.tokenizer
    line = "Tom has 12 apples.\n"
    assert tokenizer.encode(line * 1000) == tokenizer.encode(line) * 1000


# Slow and silent clients


async def _half_a_body(app: FastAPI, then: Callable[[], None] | None = None) -> tuple[int, Any]:
    """What a client gets that promises more of its body and sends nothing."""
    sent: list[dict[str, Any]] = []
    asked = [{"type": "http.request", "body": b'{"prompt"', "more_body": True}]

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        if then is not None:
            asyncio.get_running_loop().call_soon(then)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    scope |= {"query_string": b"", "raw_path": b"/v1/completions", "http_version": "1.1"}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]


def test_half_a_body_ends_in_time(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(receive_timeout=0.05)
    assert go(_half_a_body(app)) == (408, "receive_timeout")


def test_half_a_body_does_not_hold_the_drain_up(make_app: Callable[..., FastAPI]) -> None:
    app = make_app(receive_timeout=None)
    answer = go(_half_a_body(app, lambda: app.state.site.gate.drain(1000)))
    assert answer == (503, "closing")


def test_connections_that_send_nothing_are_closed() -> None:
    """With far fewer files than such connections, the server comes back and its log stays short."""
    limit = 160
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lines = Served("--receive-timeout", "2", files=limit)
    try:
        address = lines.url.removeprefix("http://").split(":")
        silent = []
        for number in range(limit + 40):
            one = socket.create_connection((address[0], int(address[1])), timeout=60)
            if number % 2:
                one.sendall(b"GET /health HTTP/1.1\r\nHost: 127")
            silent.append(one)
        answered = False
        for _ in range(100):
            try:
                answered = httpx2.get(f"{lines.url}/health", timeout=5).status_code == 200
            except httpx2.HTTPError:
                answered = False
            if answered:
                break
            time.sleep(0.2)
        for one in silent:
            one.close()
        assert answered
        assert lines.stop() == 0
        assert len(lines.log) < 200
    finally:
        lines.process.kill()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_half_a_request_does_not_delay_the_end(expected: list[list[int]]) -> None:
    served = Served("--drain", "100")
    host, port = served.url.removeprefix("http://").split(":")
    halves = [
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"
        b"Content-Type: application/json\r\n\r\n{",
    ]
    connections = [socket.create_connection((host, int(port)), timeout=60) for _ in halves]
    for connection, half in zip(connections, halves, strict=True):
        connection.sendall(half)
    httpx2.get(f"{served.url}/health")  # by now the halves were read
    assert served.stop() == 0  # waits for less than the 105 seconds that the drain may take
    assert b"503" in connections[1].recv(1000)
    for connection in connections:
        connection.close()
    assert not any("Traceback" in line for line in served.log)


# Who may call


@pytest.mark.parametrize("given", ["", " ", ",", " , "])
def test_empty_keys_do_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, given: str, tmp_path: Any
) -> None:
    monkeypatch.setenv("DINFER_API_KEYS", given)
    with pytest.raises(RequestError, match="none was given"):
        read_keys(given or None, None)  # what the command line's parser makes of it
    file = tmp_path / "keys"
    file.write_text("# staff\nfirst\n\n  # guests\n second \n")
    assert read_keys(given or None, file) == ("first", "second")


def test_other_host_names_are_refused_without_keys(make_app: Callable[..., FastAPI]) -> None:
    assert allowed_hosts("127.0.0.1", ("key",), []) == ()
    assert allowed_hosts("0.0.0.0", (), []) == ()
    assert allowed_hosts("127.0.0.1", (), ["*"]) == ()
    assert allowed_hosts("::1", (), []) == ("127.0.0.1", "[::1]", "localhost")
    hosts = allowed_hosts("127.0.0.1", (), ["models.example"])
    app = make_app(hosts=hosts)

    async def main() -> dict[str, int]:
        async with http(app) as one:
            return {
                host: (await one.get("/v1/models", headers={"host": host})).status_code
                for host in (
                    "127.0.0.1:8000",
                    "localhost",
                    "LOCALHOST:1",
                    "[::1]:8000",
                    "models.example",
                    "evil.example",
                    "127.0.0.1.evil.example:8000",
                    "evil.example:127",
                    "localhost:8000:evil",
                )
            }

    assert list(go(main()).values()) == [200] * 5 + [403] * 4


def test_cross_origin_calls_are_opt_in(make_app: Callable[..., FastAPI]) -> None:
    page = "https://page.example"
    ask = {"origin": page, "access-control-request-method": "POST"}
    ask["access-control-request-headers"] = "authorization,content-type"

    async def main(app: FastAPI) -> tuple[Any, Any]:
        async with http(app, authorization="Bearer k") as one:
            before = await one.options("/v1/completions", headers=ask)
            return before, await one.get("/v1/models", headers={"origin": page})

    before, answer = go(main(make_app(keys=("k",))))
    assert before.status_code != 200
    assert "access-control-allow-origin" not in answer.headers
    before, answer = go(main(make_app(keys=("k",), origins=(page,))))
    assert before.status_code == 200 and answer.status_code == 200
    assert before.headers["access-control-allow-origin"] == page
    assert answer.headers["access-control-allow-origin"] == page


def test_head_compression_and_slashes(app: FastAPI) -> None:
    async def main() -> list[Any]:
        async with http(app) as one:
            return [
                await one.head("/health"),
                await one.head("/"),
                await one.head("/v1/completions"),
                await one.post(
                    "/v1/completions", content=b"x", headers={"content-encoding": "gzip"}
                ),
                await one.post("/v1/completions/", json={"prompt": "x"}),
            ]

    answers = go(main())
    assert [answer.status_code for answer in answers] == [200, 200, 405, 415, 404]
    assert all(answer.content == b"" for answer in answers[:3])


def test_callers_with_different_keys_share_no_cached_prefix(
    make_app: Callable[..., FastAPI], models: dict[str, AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(keys=("one", "two"))
    seen: list[Request] = []
    llm = models["tiny-sdar"]
    serve = llm.serve
    monkeypatch.setattr(llm, "serve", lambda *r: (seen.extend(r), serve(*r))[1])

    async def main() -> None:
        for key in ("one", "one", "two"):
            async with http(app, authorization=f"Bearer {key}") as caller:
                body = {"prompt": "x", "max_tokens": 2}
                assert (await caller.post("/v1/completions", json=body)).status_code == 200

    go(main())
    salts = [request.cache_salt for request in seen]
    assert salts[0] == salts[1] != salts[2] and all(salts)
    assert not any(key in salt for key in ("one", "two") for salt in salts)


# Engines that have stopped


def test_a_stopped_engine_is_said_at_once(tmp_path: Any) -> None:
    llm = AsyncLLM("tiny-sdar", dtype="float32", device="cpu")
    app = create_app({"tiny-sdar": llm}, Settings())
    llm.close()
    status, error = go(refused(app, "/v1/completions", prompt="x"))
    assert (status, error["code"]) == (503, "stopped")


def test_many_attacks_at_once(attacked: FastAPI) -> None:
    """Bad bodies, clients that leave and ordinary calls, all together."""
    body = {"model": "random", "prompt": "ab", "max_tokens": 60, "stream": True}
    body |= {"ignore_eos": True, "decoder": "fixed"}

    async def main() -> None:
        await asyncio.gather(
            _ordinary(attacked),
            *(drive(attacked, "/v1/completions", json.dumps(body).encode(), i) for i in range(12)),
            *(refused(attacked, "/v1/completions", prompt=[{}] * 9999) for _ in range(4)),
            *(refused(attacked, "/v1/completions", prompt="1" * 900_000) for _ in range(4)),
        )

    go(main())
