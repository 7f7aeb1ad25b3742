"""Text that the pool still holds is not run again, and no stale page is ever read."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from dinfer import LLM, SamplingParams
from dinfer.engine.engine import Engine
from dinfer.kv.prefix_cache import PrefixCache
from dinfer.request import Output
from dinfer.step import PAGE

from ..conftest import request, serve


def one(engine: Engine, prompt: list[int], **options: object) -> Output:
    params = SamplingParams(max_tokens=9, ignore_eos=True, **options)  # type: ignore[arg-type]
    return serve(engine, [request("a", prompt, params)])["a"]


def test_a_prompt_runs_once(make_engine: Callable[..., Engine]) -> None:
    """100 tokens are three pages and four more: the second request runs 96 rows fewer."""
    engine, prompt = make_engine("sdar"), [i * 7 % 300 for i in range(100)]
    cold, warm = one(engine, prompt), one(engine, prompt)
    assert warm.token_ids == cold.token_ids
    assert (cold.stats.reused, warm.stats.reused) == (0, 96)
    assert warm.stats.rows_run == cold.stats.rows_run - 96
    other = one(engine, [*prompt[:40], 1, *prompt[41:]])
    assert other.stats.reused == 32
    assert other.token_ids == one(make_engine("sdar"), [*prompt[:40], 1, *prompt[41:]]).token_ids
    assert engine.pool.free == engine.pool.pages


def test_the_next_turn_of_a_chat_finds_the_answer_too(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("sdar")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first = serve(engine, [request("a", [5] * 30, params)])["a"]
    turn = [5] * 30 + first.token_ids + [8] * 3
    warm, cold = one(engine, turn), one(make_engine("sdar"), turn)
    assert warm.stats.reused == 64
    assert warm.token_ids == cold.token_ids


def test_a_short_beginning_is_copied_into_a_run(make_engine: Callable[..., Engine]) -> None:
    """One known page before a long answer: what every step reads lies in one run. Three known pages
    before a short one are shared. Both give the tokens of an engine without memory.
    """
    engine = make_engine("sdar")
    for prompt, count, copied in (([7] * 33, 90, True), ([8] * 99, 9, False)):
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        one(engine, prompt)
        engine.add(request("again", prompt, params))
        engine.step()
        (sequence,) = engine.scheduler.running
        assert sequence.stats.reused == len(prompt) // PAGE * PAGE
        assert engine.pool.prefix_cache is not None
        assert (sequence.pages[0] not in engine.pool.prefix_cache.pages) == copied
        assert sequence.places[0].in_one_run or not copied
        while engine.busy:
            engine.step()
        want = serve(make_engine("sdar"), [request("a", prompt, params)])["a"]
        assert sequence.canvas.tokens[len(prompt) :][:count].tolist() == want.token_ids
        assert engine.pool.free == engine.pool.pages


@pytest.mark.parametrize("options", [{"cache": "none"}, {"cache": "dual"}, {"guidance": 1.0}])
def test_only_final_rows_are_reused(
    make_engine: Callable[..., Engine], options: dict[str, object]
) -> None:
    engine = make_engine("sdar")
    for _ in range(2):
        assert one(engine, [6] * 70, **options).stats.reused == 0


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_requests_in_a_small_pool(make_engine: Callable[..., Engine], count: int) -> None:
    """Prompts that share beginnings, some aborted half way, twelve pages: pages are dropped and
    filled with NaN all the time, and every answer is that of an engine of its own.
    """
    rng, engine = random.Random(4), make_engine("sdar", pages=12, sequences=3)
    stems = [[rng.randrange(300) for _ in range(n)] for n in (40, 70, 100)]
    alone: dict[tuple[int, ...], list[int]] = {}
    reused = 0
    quick = {"decoder": "fixed:steps=1"}  # few steps: what is tested are the pages
    for number in range(count):
        stem = rng.choice(stems)
        prompt = stem[: rng.choice([33, 64, len(stem)])] + [rng.randrange(3)] * rng.randrange(3)
        if rng.random() < 0.3:
            engine.add(request(f"gone-{number}", prompt, SamplingParams(max_tokens=20)))
            for _ in range(rng.randrange(3)):
                engine.step()
            engine.abort(f"gone-{number}")
        output = one(engine, prompt, **quick)
        reused += output.stats.reused
        if tuple(prompt) not in alone:
            alone[tuple(prompt)] = one(make_engine("sdar", pages=8), prompt, **quick).token_ids
        assert output.token_ids == alone[tuple(prompt)]
        assert engine.pool.free == engine.pool.pages
    assert reused > count * 20


def test_the_tree_against_a_list_of_all_texts() -> None:
    """1,000 random texts: what is found is the longest beginning that was kept and not dropped."""
    rng, prefixes = random.Random(5), PrefixCache(8)
    known: dict[bytes, int] = {}  # beginning -> its last page
    fresh = iter(range(10**6))
    for _ in range(1000):
        tokens = np.repeat([rng.randrange(3) for _ in range(rng.randrange(5))], PAGE)
        tokens = np.append(tokens, [9] * rng.randrange(PAGE)).astype(np.int64)
        heads = [tokens[:end].tobytes() for end in range(PAGE, len(tokens) + 1, PAGE)]
        expected = []
        for head in heads:
            if head not in known:
                break
            expected.append(known[head])
        assert prefixes.match(tokens) == expected
        pages = expected + [next(fresh) for _ in heads[len(expected) :]]
        prefixes.insert(tokens, pages)
        known |= dict(zip(heads, pages, strict=True))
        while len(known) > 20:
            busy = set(pages)
            dropped = prefixes.evict(lambda page, busy=busy: page not in busy)  # type: ignore[misc]
            if not dropped:
                break
            (gone,) = [head for head, page in known.items() if page == dropped[0]]
            assert not any(head != gone and head.startswith(gone) for head in known)
            del known[gone]
        assert prefixes.pages == set(known.values())


def test_bundled_model_runs_a_long_prompt_once() -> None:
    llm = LLM("tiny-sdar", dtype="float32", device="cpu", kv_memory=0.1)
    prompt = [i % 50 + 10 for i in range(400)]
    params = SamplingParams(max_tokens=8)
    cold, warm = (llm.generate(prompt, params)[0] for _ in range(2))
    assert warm.token_ids == cold.token_ids
    assert 400 - warm.stats.reused <= 0.1 * 400


def test_a_million_tokens() -> None:
    """One text of a million tokens is inserted, matched and evicted from its end, without
    recursion, and eviction looks at each unit a bounded number of times.
    """
    count = 10**6 // PAGE
    cache, tokens = PrefixCache(PAGE), np.arange(count * PAGE)
    cache.insert(tokens, list(range(count)))
    assert cache.match(tokens) == list(range(count))
    looks = 0

    def idle(page: int) -> bool:
        nonlocal looks
        looks += 1
        return True

    for last in (count - 1, count - 2):
        assert cache.evict(idle) == [last]
    assert cache.evict(idle, count) == list(range(count - 3, -1, -1))
    assert looks == count and not cache.pages and not cache.match(tokens)


def test_busy_units_are_left_and_come_back() -> None:
    cache = PrefixCache(PAGE)
    texts = [np.full(PAGE, i) for i in range(4)]
    for page, text in enumerate(texts):
        cache.insert(text, [page])
    cache.match(texts[0])  # now the most recently used
    assert cache.evict(lambda page: page != 1) == [2]
    assert cache.evict(lambda page: True, 9) == [1, 3, 0]


def test_a_salt_separates_texts() -> None:
    cache, text = PrefixCache(PAGE), np.arange(2 * PAGE)
    cache.insert(text, [0, 1], salt="one")
    assert cache.match(text) == cache.match(text, salt="other") == []
    assert cache.match(text, salt="one") == [0, 1]


def test_a_leaf_that_grew_and_shrank_leaves_once() -> None:
    cache, text = PrefixCache(PAGE), np.arange(2 * PAGE)
    cache.insert(text[:PAGE], [0])
    cache.insert(text, [0, 1])
    assert cache.evict(lambda page: page == 1, 2) == [1]
    assert cache.evict(lambda page: True, 9) == [0]
    assert cache.evict(lambda page: True) == []
