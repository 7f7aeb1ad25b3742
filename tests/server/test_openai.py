"""The official client, in process: every answer is that of the offline LLM."""

import asyncio
from typing import Any

import openai
import pytest
import torch
from fastapi import FastAPI

from dinfer import LLM, SamplingParams

from .conftest import ANSWER, PROBLEM, client, go, post, refused

MESSAGES: Any = [{"role": "user", "content": PROBLEM}]


def test_completion_with_n_and_seed(app: FastAPI, offline: dict[str, LLM]) -> None:
    params = SamplingParams(max_tokens=64, temperature=1.3, top_p=0.95, n=3, seed=5)
    expected = offline["tiny-sdar"].generate(PROBLEM, params)
    answer = go(
        client(app).completions.create(
            model="tiny-sdar",
            prompt=PROBLEM,
            max_tokens=64,
            temperature=1.3,
            top_p=0.95,
            n=3,
            seed=5,
        )
    )
    assert [c.text for c in answer.choices] == [o.text for o in expected]
    assert [c.token_ids for c in answer.choices] == [o.token_ids for o in expected]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.finish_reason for c in answer.choices] == [o.finish_reason for o in expected]
    assert answer.usage.completion_tokens == sum(o.usage.completion_tokens for o in expected)
    assert answer.usage.prompt_tokens == expected[0].usage.prompt_tokens
    assert answer.object == "text_completion" and answer.model == "tiny-sdar"


def test_min_tokens_and_repetition(app: FastAPI, offline: dict[str, LLM]) -> None:
    """The answer ends long before its 60th token, if it may."""
    params = SamplingParams(max_tokens=64, min_tokens=60)
    (expected,) = offline["tiny-sdar"].generate(PROBLEM, params)
    asked = {"model": "tiny-sdar", "prompt": PROBLEM, "max_tokens": 64}
    (found,) = go(post(app, "/v1/completions", **asked, min_tokens=60))["choices"]
    assert found["token_ids"] == expected.token_ids and len(expected.token_ids) >= 60
    assert found["stats"]["repetition"] == expected.stats.repetition
    status, error = go(refused(app, "/v1/completions", **asked, min_tokens=65))
    assert (status, error["param"]) == (400, "min_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_list_of_prompts(app: FastAPI, offline: dict[str, LLM], stream: bool) -> None:
    prompts: Any = ["ab", "Hello, how", "x" * 30]
    params = SamplingParams(max_tokens=11, n=2, seed=1, temperature=1.0)
    expected = [o.text for o in offline["random"].generate(prompts, params)]

    async def main() -> list[str]:
        asked: Any = {"model": "random", "prompt": prompts, "max_tokens": 11, "n": 2, "seed": 1}
        answer = await client(app).completions.create(**asked, temperature=1.0, stream=stream)
        if not stream:
            return [choice.text for choice in answer.choices]
        texts = [""] * 6
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts

    assert go(main()) == expected


@pytest.mark.parametrize("many", [False, True])
def test_token_ids_as_prompt(app: FastAPI, offline: dict[str, LLM], many: bool) -> None:
    ids = [5, 6, 7, 300]
    (expected,) = offline["random"].generate([ids], SamplingParams(max_tokens=9, ignore_eos=True))
    answer = go(
        client(app).completions.create(
            model="random",
            prompt=[ids, [1]] if many else ids,
            max_tokens=9,
            extra_body={"ignore_eos": True},
        )
    )
    assert answer.choices[0].token_ids == expected.token_ids
    assert len(answer.choices) == 1 + many


def test_chat(app: FastAPI, offline: dict[str, LLM]) -> None:
    answer = go(client(app).chat.completions.create(model="tiny-sdar", messages=MESSAGES))
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == ANSWER
    assert choice.finish_reason == "stop" and answer.object == "chat.completion"
    (expected,) = offline["tiny-sdar"].chat(MESSAGES)
    assert answer.usage.total_tokens == expected.usage.total_tokens
    assert choice.stats["forward_passes"] == expected.stats.forward_passes


def test_content_parts_are_one_text(app: FastAPI) -> None:
    parts: Any = [{"type": "text", "text": PROBLEM[:20]}, {"type": "text", "text": PROBLEM[20:]}]
    messages: Any = [{"role": "user", "content": parts}]
    answer = go(client(app).chat.completions.create(model="tiny-sdar", messages=messages))
    assert answer.choices[0].message.content == ANSWER


def test_an_answer_goes_back_as_it_came(app: FastAPI) -> None:
    """The usual loop: append the message object of the answer, ask again."""

    async def main() -> tuple[Any, Any]:
        one, said = client(app), list(MESSAGES)
        asked: Any = {"model": "tiny-sdar", "messages": said, "store": False, "metadata": {}}
        first = await one.chat.completions.create(**asked)
        said += [first.choices[0].message, {"role": "user", "content": PROBLEM}]
        return first, await one.chat.completions.create(**asked)

    first, second = go(main())
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens


def test_headers_of_answers(app: FastAPI) -> None:
    late: Any = {"timeout": 0.001, "ignore_eos": True, "decoder": "fixed"}

    async def main() -> tuple[Any, Any, Any]:
        raw = client(app).chat.completions.with_raw_response
        asked: Any = {"model": "tiny-sdar", "messages": MESSAGES}
        whole, stream = await raw.create(**asked), await raw.create(**asked, stream=True)
        with pytest.raises(openai.APIStatusError) as caught:
            await raw.create(**asked, max_tokens=400, extra_body=late)
        return whole, stream, caught.value

    whole, stream, error = go(main())
    assert len({whole.request_id, stream.request_id, error.request_id} - {None}) == 3
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    # The client would ask again after any other 408.
    assert error.status_code == 408 and error.response.headers["x-should-retry"] == "false"


def test_chat_stream(app: FastAPI) -> None:
    async def main() -> list[Any]:
        options: Any = {"include_usage": True}
        stream = await client(app).chat.completions.create(
            model="tiny-sdar", messages=MESSAGES, stream=True, stream_options=options
        )
        return [chunk async for chunk in stream]

    first, *chunks, end, usage = go(main())
    assert first.choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(pieces) == ANSWER and len(pieces) > 2
    assert end.choices[0].finish_reason == "stop"
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert usage.choices == [] and usage.usage.completion_tokens == 18
    assert len({chunk.id for chunk in (first, *chunks, end, usage)}) == 1


def test_many_callers_at_once(app: FastAPI) -> None:
    one = client(app)
    work = [one.chat.completions.create(model="tiny-sdar", messages=MESSAGES) for _ in range(12)]

    async def main() -> list[Any]:
        return await asyncio.gather(*work)

    assert {answer.choices[0].message.content for answer in go(main())} == {ANSWER}


@pytest.mark.parametrize("stop", ["12+7", ["zzz", "12+7"]])
def test_stop(app: FastAPI, stop: Any) -> None:
    answer = go(
        client(app).completions.create(model="tiny-sdar", prompt=PROBLEM, max_tokens=64, stop=stop)
    )
    assert answer.choices[0].text == ANSWER[: ANSWER.index("12+7")]
    assert answer.choices[0].finish_reason == "stop"


def test_suffix_is_seen_and_left_out(app: FastAPI, offline: dict[str, LLM]) -> None:
    suffix = ".\n#### 19"
    (expected,) = offline["tiny-sdar"].generate(PROBLEM, SamplingParams(max_tokens=8), suffix)
    answer = go(
        client(app).completions.create(
            model="tiny-sdar", prompt=PROBLEM, suffix=suffix, max_tokens=8
        )
    )
    (choice,) = answer.choices
    assert choice.token_ids == expected.token_ids[:8]
    assert choice.text + suffix == expected.text
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 8


@pytest.mark.parametrize("stream", [False, True])
def test_echo(app: FastAPI, stream: bool) -> None:
    async def main() -> str:
        asked: Any = {"model": "tiny-sdar", "prompt": PROBLEM, "max_tokens": 64, "echo": True}
        answer = await client(app).completions.create(**asked, stream=stream)
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    assert go(main()) == PROBLEM + ANSWER


def test_logprobs(app: FastAPI, offline: dict[str, LLM]) -> None:
    params = SamplingParams(max_tokens=64, logprobs=True)
    (expected,) = offline["tiny-sdar"].generate(PROBLEM, params)
    asked: Any = {"model": "tiny-sdar", "max_tokens": 64}

    async def main() -> tuple[Any, Any, Any]:
        one = client(app)
        plain = await one.completions.create(**asked, prompt=PROBLEM, logprobs=1)
        chat = await one.chat.completions.create(
            **asked, messages=MESSAGES, logprobs=True, top_logprobs=1
        )
        stream = await one.completions.create(**asked, prompt=PROBLEM, logprobs=0, stream=True)
        return plain, chat, [chunk async for chunk in stream]

    plain, chat, chunks = go(main())
    found = plain.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(expected.logprobs)
    assert "".join(found.tokens) == expected.text
    text = plain.choices[0].text
    for word, offset in zip(found.tokens, found.text_offset, strict=True):
        assert text[offset : offset + len(word)] == word
    content = chat.choices[0].logprobs.content
    assert [t.logprob for t in content] == pytest.approx(expected.logprobs)
    # Without sampling the chosen token is the likeliest one.
    assert all(t.top_logprobs[0].logprob == pytest.approx(t.logprob) for t in content)
    assert bytes(b for t in content for b in t.bytes).decode() == ANSWER
    assert chunks[-1].choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs)
    assert chunks[-1].choices[0].logprobs.top_logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_likeliest_tokens(app: FastAPI, offline: dict[str, LLM], temperature: float) -> None:
    """One blank, so one plain pass over the canvas says what is likely there."""
    llm = offline["random"]
    ids = [5, 6, 7, 9]
    logits = llm.logits([*ids, llm.facts.mask_id])[-1].float()
    logits[llm.facts.mask_id] = -torch.inf
    values, tokens = logits.log_softmax(0).topk(8)
    asked: Any = {"model": "random", "max_tokens": 1, "temperature": temperature, "seed": 3}
    asked["extra_body"] = {"ignore_eos": True}

    async def main() -> tuple[Any, Any]:
        one = client(app)
        plain = await one.completions.create(**asked, prompt=ids, logprobs=8)
        asked["messages"] = [{"role": "user", "content": "ab"}]
        chat = await one.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
        return plain.choices[0], chat.choices[0]

    plain, chat = go(main())
    words = [llm.prompts.tokenizer.decode([t], skip_special=False) for t in tokens.tolist()]
    (own,) = plain.token_ids
    assert plain.logprobs.token_logprobs[0] == pytest.approx(
        float(logits.log_softmax(0)[own]), rel=1e-4
    )
    expected: dict[str, float] = {}
    for word, value in zip(words, values.tolist(), strict=True):
        expected.setdefault(word, value)
    expected.setdefault(plain.logprobs.tokens[0], plain.logprobs.token_logprobs[0])
    assert plain.logprobs.top_logprobs[0] == pytest.approx(expected, rel=1e-4)
    (entry,) = chat.logprobs.content
    found = [top.logprob for top in entry.top_logprobs]
    assert len(found) == 3 and found == sorted(found, reverse=True)
    assert found[0] >= entry.logprob


def test_strategies_of_a_request(app: FastAPI) -> None:
    """A token a forward, or all that is sure: the same server, the same moment."""

    async def main() -> list[int]:
        one = client(app)
        specs = ({"decoder": "fixed", "cache": "none"}, {"decoder": "threshold:threshold=0.5"})
        asked: Any = {"model": "tiny-sdar", "prompt": PROBLEM, "max_tokens": 20}
        given = [one.completions.create(**asked, extra_body=spec) for spec in specs]
        return [a.choices[0].stats["forward_passes"] for a in await asyncio.gather(*given)]

    slow, fast = go(main())
    assert slow >= 18 > fast


def test_without_a_seed_answers_differ_and_can_be_had_again(app: FastAPI) -> None:
    asked: Any = {"model": "random", "prompt": "abc", "max_tokens": 24, "temperature": 1.0}

    async def main() -> list[Any]:
        one = client(app)
        first = (await one.completions.create(**asked)).choices[0]
        other = (await one.completions.create(**asked)).choices[0]
        again = (await one.completions.create(**asked, seed=first.stats["seed"])).choices[0]
        return [first.token_ids, other.token_ids, again.token_ids]

    first, other, again = go(main())
    assert first == again != other


def test_models(app: FastAPI) -> None:
    async def main() -> tuple[list[str], Any]:
        one = client(app)
        return [m.id for m in (await one.models.list()).data], await one.models.retrieve("random")

    names, random = go(main())
    assert names == ["tiny-sdar", "random"]
    assert random.family == "llada" and random.block_length is None


def test_default_length_shrinks_to_the_context(app: FastAPI) -> None:
    """Nobody asked for 128 tokens, so a prompt that leaves less room is no error."""
    answer = go(client(app).completions.create(model="tiny-sdar", prompt=[9] * 500))
    assert answer.usage.completion_tokens <= 12


@pytest.mark.parametrize(
    ("error", "given", "param"),
    [
        (openai.NotFoundError, {"model": "tiny-sda"}, "model"),
        (openai.BadRequestError, {"max_tokens": 100000}, "max_tokens"),
        (openai.BadRequestError, {"prompt": [10**6]}, "prompt"),
        (openai.BadRequestError, {"temperature": -1.0}, "temperature"),
        (openai.BadRequestError, {"stop": ""}, "stop"),
        (openai.BadRequestError, {"n": 1000}, "n"),
        (openai.BadRequestError, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (openai.BadRequestError, {"logit_bias": {"5": 1}}, "logit_bias"),
        (openai.BadRequestError, {"best_of": 2}, "best_of"),
        (openai.BadRequestError, {"stream": False, "stream_options": {}}, "stream_options"),
        (openai.BadRequestError, {"logprobs": 9}, "logprobs"),
        (openai.BadRequestError, {"logprobs": 0, "echo": True}, "echo"),
        (openai.BadRequestError, {"extra_body": {"min_p": 0.1}}, "min_p"),
        (openai.BadRequestError, {"extra_body": {"decoder": "treshold"}}, "decoder"),
        (openai.BadRequestError, {"extra_body": {"cache": "dual:x=1"}}, "cache"),
        (openai.BadRequestError, {"extra_body": {"iteration": "blockwise:length=-1"}}, "iteration"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    app: FastAPI, error: type[openai.APIStatusError], given: Any, param: str, stream: bool
) -> None:
    asked = {"model": "tiny-sdar", "prompt": "x", "stream": stream} | given
    with pytest.raises(error) as caught:
        go(client(app).completions.create(**asked))
    assert caught.value.param == param
    assert isinstance(caught.value.body, dict) and caught.value.body["message"].endswith(".")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 9}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "<|mask|>"}}]}, "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_chat_refusals(app: FastAPI, given: Any, param: str) -> None:
    asked = {"model": "tiny-sdar", "messages": MESSAGES} | given
    with pytest.raises(openai.BadRequestError) as caught:
        go(client(app).chat.completions.create(**asked))
    assert str(caught.value.param).partition(".")[0] == param
