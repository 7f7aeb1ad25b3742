"""`LLM` and `AsyncLLM` on the bundled models."""

import asyncio
import itertools
from dataclasses import replace

import pytest
import torch

from dinfer import LLM, AsyncLLM, SamplingParams
from dinfer.engine.engine import Event
from dinfer.eval.tasks import evaluate
from dinfer.loader.load import bundled
from dinfer.request import CanvasEvent, Output, TextEvent
from dinfer.train.corpus import draws, prompt_of

PROBLEM = "Tom has 12 apples. Then he buys 7 more. How many apples does Tom have now?"


@pytest.fixture(scope="module", params=["tiny-sdar", "tiny-llada"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(request.param, dtype="float32", device="cpu")


def problems(count: int) -> list[str]:
    return [prompt_of(e) for e in itertools.islice(draws("math", "dev", 0), count)]


def test_bundled_models() -> None:
    assert bundled() == ["tiny-llada", "tiny-sdar"]


def test_readme_problem(llm: LLM) -> None:
    (out,) = llm.generate(PROBLEM, SamplingParams(max_tokens=96))
    assert out.text.endswith("#### 19")
    assert out.finish_reason == "stop"
    assert out.usage.completion_tokens == len(out.token_ids)
    assert out.stats.tokens == len(out.token_ids) + 1
    assert out.stats.tokens_per_forward > 1


def test_chat_equals_generate_on_a_chat_only_model(llm: LLM) -> None:
    (chat,) = llm.chat([{"role": "user", "content": PROBLEM}])
    (plain,) = llm.generate([PROBLEM])
    assert chat.token_ids == plain.token_ids


def test_stream_gives_the_text_in_order(llm: LLM) -> None:
    params = SamplingParams(max_tokens=96)
    events = list(llm.stream(PROBLEM, params))
    text = "".join(event.text for event in events if isinstance(event, TextEvent))
    last = events[-1]
    assert isinstance(last, TextEvent) and last.output is not None
    assert text == last.output.text == llm.generate(PROBLEM, params)[0].text
    steps = [event.step for event in events if isinstance(event, CanvasEvent)]
    assert steps == list(range(1, last.output.stats.forward_passes + 1))


@pytest.mark.parametrize("stop", [(), ("####",), ("never",)])
def test_who_is_not_watched_answers_the_same(llm: LLM, stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=96, stop=stop)
    seen: list[Event] = []
    (watched,) = llm.generate(PROBLEM, params, on_event=seen.append)
    (quiet,) = llm.generate(PROBLEM, params)
    assert (quiet.text, quiet.token_ids) == (watched.text, watched.token_ids)
    assert quiet.finish_reason == watched.finish_reason
    assert quiet.stats.forward_passes == watched.stats.forward_passes
    (request,) = llm.prompts.complete(PROBLEM, params)
    llm.engine.add(replace(request, quiet=True))
    events = []
    while llm.engine.busy:
        events += llm.engine.step()
    (event,) = events
    assert isinstance(event, TextEvent) and event.text == watched.text
    assert len(seen) > watched.stats.forward_passes


def test_outputs_come_as_they_are_done(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (60, 4)]
    came: list[Output] = []
    outputs = llm.generate([PROBLEM] * 2, params, on_output=came.append)
    assert came == outputs[::-1]


def test_an_aborted_quiet_request_has_the_text_of_its_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=96, iteration="blockwise:length=2", decoder="fixed")
    outputs = []
    for quiet in (False, True):
        (request,) = llm.prompts.complete(PROBLEM, params)
        llm.engine.add(replace(request, quiet=quiet))
        for _ in range(9):
            llm.engine.step()
        (event,) = llm.engine.abort(request.id)
        assert isinstance(event, TextEvent) and event.output is not None
        outputs.append(event.output)
    assert outputs[0].text
    assert outputs[1].text == outputs[0].text
    assert outputs[1].token_ids == outputs[0].token_ids


def test_leaving_a_stream_frees_its_pages(llm: LLM) -> None:
    for _ in llm.stream(PROBLEM):
        break
    assert llm.engine.pool.free == llm.engine.pool.pages
    assert not llm.engine.busy


def test_infill_leaves_fixed_text_alone(llm: LLM) -> None:
    text = "Add [BLANK:1]: 12+7=[BLANK:2].\nüber 日本 🙂 [BLANK:3] <|mask|> #### 19"
    out = llm.infill(text, prompt=PROBLEM)
    left, *pieces = (
        text.replace("[BLANK:1]", "\0")
        .replace("[BLANK:2]", "\0")
        .replace("[BLANK:3]", "\0")
        .split("\0")
    )
    expected = left
    for hole, piece in zip(out.holes, pieces, strict=True):
        expected += hole + piece
    assert out.text == expected
    assert len(out.holes) == 3
    special = llm.tokenizer.special_ids if llm.tokenizer else ()
    assert not set(special) & set(out.token_ids) - set(llm.prompts.tokenizer.encode(text))


def test_suffix(llm: LLM) -> None:
    (out,) = llm.generate(PROBLEM, SamplingParams(max_tokens=6), suffix=" #### 19")
    tail = llm.prompts.tokenizer.encode(" #### 19")
    assert out.token_ids[6:] == tail
    assert len(out.token_ids) == 6 + len(tail)


def test_stop_strings_are_left_out_also_across_tokens(llm: LLM) -> None:
    full = llm.generate(PROBLEM)[0].text
    stop = full[len(full) // 2 - 2 : len(full) // 2 + 3]
    (out,) = llm.generate(PROBLEM, SamplingParams(stop=(stop,)))
    assert out.text == full[: full.index(stop)]
    assert out.finish_reason == "stop"


def test_answers_of_one_prompt_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(max_tokens=64, temperature=3.0, n=4, seed=3)
    first, again = llm.generate(PROBLEM, params), llm.generate(PROBLEM, params)
    assert [o.token_ids for o in first] == [o.token_ids for o in again]
    assert len({tuple(o.token_ids) for o in first}) > 1
    alone = llm.generate(PROBLEM, SamplingParams(max_tokens=64, temperature=3.0, seed=3))
    assert alone[0].token_ids == first[0].token_ids


def test_logits_are_those_of_the_first_step(llm: LLM) -> None:
    """The first commit of a stream is the surest token under `logits` of the same canvas."""
    ids = llm.prompts.ids(PROBLEM)
    length = llm.facts.block_length or 1
    canvas = len(ids) + 30 if length == 1 else -(-(len(ids) + 30) // length) * length
    logits = llm.logits(ids + [llm.facts.mask_id] * (canvas - len(ids)))
    logits[:, llm.facts.mask_id] = -torch.inf
    events = llm.stream(PROBLEM, SamplingParams(max_tokens=30, decoder="fixed", cache="none"))
    first = next(e for e in events if isinstance(e, CanvasEvent))
    place = len(ids) + first.positions[0]
    p = logits[place].softmax(dim=0)
    assert first.token_ids == [int(p.argmax())]
    assert first.confidence[0] == pytest.approx(p.max().item(), rel=1e-4)
    events.close()


def test_logits_of_nothing(llm: LLM) -> None:
    assert llm.logits([]).shape == (0, llm.loaded.model.shape.vocab)


def test_evaluation_counts(llm: LLM) -> None:
    score = evaluate(llm, "math", "dev", 4, SamplingParams(max_tokens=96), single_num=2)
    assert score.num == 4 and score.single_num == 2
    assert 0 <= score.accuracy <= 100
    assert score.tokens_per_forward > 1


def test_many_asyncio_callers_get_the_offline_tokens(llm: LLM) -> None:
    asked = problems(6)
    params = SamplingParams(max_tokens=64)
    offline = [o.token_ids for o in llm.generate(asked, params)]

    async def main() -> list[list[int]]:
        other = AsyncLLM(llm.loaded.name, dtype="float32", device="cpu")
        try:
            async for event in other.stream(asked[0], params):
                assert event.id  # the caller leaves at once; its request is aborted
                break
            found = await asyncio.gather(*(other.generate(p, params) for p in asked))
            with pytest.raises(ValueError, match="context of this model is 512"):
                await other.generate(asked[0], SamplingParams(max_tokens=600))
            assert other._thread._engine.pool.free == other._thread._engine.pool.pages
            return [outputs[0].token_ids for outputs in found]
        finally:
            other.close()

    assert asyncio.run(main()) == offline
