"""What a canvas adds to the protocol: provisional events, holes, pins, tokens."""

import itertools
import json
import math
from typing import Any

import pytest
from fastapi import FastAPI

from dinfer import LLM, SamplingParams
from dinfer.request import CanvasEvent

from .conftest import ANSWER, PROBLEM, data_of, drive, go, http, post, refused


def stream(app: FastAPI, path: str, **body: Any) -> list[Any]:
    """The events of a stream, which must end well."""
    asked = json.dumps(body | {"stream": True}).encode()
    *events, done = data_of(go(drive(app, path, asked)))
    assert done == "[DONE]"
    return events


def test_canvas_events_are_the_engines(app: FastAPI, offline: dict[str, LLM]) -> None:
    params = SamplingParams(max_tokens=64)
    events = [e for e in offline["tiny-sdar"].stream(PROBLEM, params) if isinstance(e, CanvasEvent)]
    options = {"include_canvas": True, "include_usage": True}
    found = stream(app, "/v1/completions", prompt=PROBLEM, max_tokens=64, stream_options=options)
    blank, *steps = [chunk["canvas"] for chunk in found if "canvas" in chunk]
    assert (blank["step"], blank["length"], blank["positions"]) == (0, 64, [])
    assert [c["step"] for c in steps] == [e.step for e in events]
    assert [c["positions"] for c in steps] == [e.positions for e in events]
    assert [c["token_ids"] for c in steps] == [e.token_ids for e in events]
    for chunk, event in zip(steps, events, strict=True):
        assert chunk["confidence"] == pytest.approx(event.confidence)
        words = [offline["tiny-sdar"].prompts.tokenizer.decode([t], False) for t in event.token_ids]
        assert chunk["tokens"] == words
    assert all(chunk["choices"] == [] for chunk in found if "canvas" in chunk)
    assert found[-1]["usage"]["completion_tokens"] == 18


def test_text_is_only_what_the_canvas_has_settled(app: FastAPI) -> None:
    """No text comes before the step that set its last token, and the canvas spells the answer."""
    found = stream(
        app,
        "/v1/completions",
        prompt=PROBLEM,
        max_tokens=64,
        stream_options={"include_canvas": True},
    )
    canvas: dict[int, str] = {}
    text = ""
    for chunk in found:
        if "canvas" in chunk:
            canvas |= dict(
                zip(chunk["canvas"]["positions"], chunk["canvas"]["tokens"], strict=True)
            )
            continue
        text += chunk["choices"][0]["text"]
        run = itertools.takewhile(canvas.__contains__, itertools.count())
        assert "".join(canvas[place] for place in run).startswith(text)
    assert text == ANSWER


def test_no_canvas_unless_asked_for(app: FastAPI) -> None:
    found = stream(app, "/v1/completions", prompt=PROBLEM, max_tokens=64)
    assert not any("canvas" in chunk or "usage" in chunk for chunk in found)


def test_infill(app: FastAPI, offline: dict[str, LLM]) -> None:
    text = "Add [BLANK:1]: 12+7=[BLANK:2].\nüber [BLANK:1][BLANK:2] <|mask|> #### 19"
    expected = offline["tiny-sdar"].infill(text, SamplingParams(logprobs=True), PROBLEM)
    answer = go(post(app, "/v1/infill", text=text, prompt=PROBLEM))
    (choice,) = answer["choices"]
    assert choice["text"] == expected.text
    assert [hole["text"] for hole in choice["holes"]] == expected.holes
    assert expected.logprobs is not None
    for hole in choice["holes"]:
        place, size = hole["position"], len(hole["token_ids"])
        assert hole["token_ids"] == expected.token_ids[place : place + size]
        logs = expected.logprobs[place : place + size]
        assert hole["confidence"] == pytest.approx([math.exp(x) for x in logs])
        assert hole["mean_confidence"] == pytest.approx(math.exp(sum(logs) / size))
    assert [len(hole["token_ids"]) for hole in choice["holes"]] == [1, 2, 1, 2]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == expected.usage.total_tokens


def test_infill_answers_differ_by_seed_alone(app: FastAPI) -> None:
    asked: Any = {"model": "random", "text": "ab[BLANK:9]yz", "temperature": 1.0, "seed": 4, "n": 3}
    answer = go(post(app, "/v1/infill", **asked))
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3 and all(t.startswith("ab") and t.endswith("yz") for t in texts)
    assert texts == [c["text"] for c in go(post(app, "/v1/infill", **asked))["choices"]]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 27, "total_tokens": 31}


def test_pinned_positions(app: FastAPI) -> None:
    pinned = [{"position": 2, "content": "cat"}, {"position": 8, "content": [300, 301]}]
    asked: Any = {"model": "random", "pinned": pinned, "max_tokens": 12, "prompt": "A "}
    (choice,) = go(post(app, "/v1/infill", **asked))["choices"]
    sizes = [(hole["position"], len(hole["token_ids"])) for hole in choice["holes"]]
    assert sizes == [(0, 2), (5, 3), (10, 2)]
    found = stream(app, "/v1/infill", **asked, stream_options={"include_canvas": True})
    canvases = [chunk["canvas"] for chunk in found if "canvas" in chunk]
    assert canvases[0]["length"] == 12
    assert canvases[0]["positions"] == [2, 3, 4, 8, 9]
    assert canvases[0]["tokens"][:3] == [*"cat"]
    assert canvases[0]["token_ids"][3:] == [300, 301]
    later = [place for canvas in canvases[1:] for place in canvas["positions"]]
    assert sorted(later) == [0, 1, 5, 6, 7, 10, 11]
    assert found[-1]["choices"][0]["holes"] == choice["holes"]


def test_a_fully_pinned_canvas_needs_no_step(app: FastAPI) -> None:
    pinned = [{"position": 0, "content": "abc"}]
    asked: Any = {"model": "random", "pinned": pinned, "max_tokens": 3}
    (choice,) = go(post(app, "/v1/infill", **asked))["choices"]
    assert (choice["text"], choice["holes"]) == ("abc", [])
    assert choice["stats"]["forward_passes"] == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a[BLANK:2]", "pinned": [{"position": 0, "content": "x"}]}, "text"),
        ({"text": "no hole"}, "text"),
        ({"text": "[BLANK:0]"}, "text"),
        ({"text": "[BLANK:999999999]"}, "text"),
        ({"text": "[BLANK:2]", "max_tokens": 5}, "max_tokens"),
        ({"pinned": [{"position": 0, "content": "x"}]}, "max_tokens"),
        ({"pinned": [{"position": 3, "content": "ab"}], "max_tokens": 4}, "pinned"),
        ({"pinned": [{"position": 0, "content": "ab"}] * 2, "max_tokens": 4}, "pinned"),
        (
            {"pinned": [{"position": 0, "content": "ab"}, {"position": 1, "content": "c"}],
             "max_tokens": 4},
            "pinned",
        ),
        ({"pinned": [{"position": 0, "content": [9999]}], "max_tokens": 4}, "pinned"),
        ({"text": "[BLANK:2]", "stop": "x"}, "stop"),
    ],
)  # fmt: skip
def test_infill_refusals(app: FastAPI, body: Any, param: str) -> None:
    status, error = go(refused(app, "/v1/infill", model="random", **body))
    assert (status, error["param"]) == (400, param)


def test_tokens_there_and_back(app: FastAPI) -> None:
    text = "Tom has <|mask|> 12 äpfel 🙂 <|im_end|>\n"
    for model in ("tiny-sdar", "random"):
        found = go(post(app, "/tokenize", model=model, prompt=text))
        assert found["count"] == len(found["tokens"])
        back = go(post(app, "/detokenize", model=model, tokens=found["tokens"]))
        assert back["prompt"] == text


def test_tokens_of_a_conversation_are_the_prompt_of_chat(
    app: FastAPI, offline: dict[str, LLM]
) -> None:
    messages = [{"role": "user", "content": PROBLEM}]
    found = go(post(app, "/tokenize", messages=messages))
    assert found["tokens"] == offline["tiny-sdar"].prompts.chat(messages)
    status, error = go(refused(app, "/tokenize"))
    assert (status, error["param"]) == (400, "prompt")


def test_strategies_are_all_there(app: FastAPI) -> None:
    from dinfer import registry

    async def main() -> Any:
        async with http(app) as one:
            return (await one.get("/v1/strategies")).json()

    found = go(main())
    for kind in registry.STRATEGIES:
        assert [s["name"] for s in found[kind]] == registry.names(kind)
        for one in found[kind]:
            spec = ":".join([one["name"], *(f"{k}={v}" for k, v in one["options"].items())])
            assert registry.build(kind, spec) == registry.build(kind, one["name"])
