"""Requests that broke the engine, or made it serve nobody else, before they were given bounds."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dinfer import LLM, registry
from dinfer.canvas import Canvas
from dinfer.engine.engine import Engine
from dinfer.engine.scheduler import PATIENCE
from dinfer.errors import DinferError, EngineError
from dinfer.request import FailureEvent, Request, SamplingParams, TextEvent
from dinfer.step import CacheState, Commit, ModelInfo, Proposal, StepPlan, Window

from ..attack import check_unharmed
from ..conftest import request, serve

PROMPT = list(range(5, 25))


@dataclass(frozen=True)
class Raises:
    """A decoder that raises in its third step."""

    needs: ClassVar[frozenset[str]] = frozenset()
    monotone: ClassVar[bool] = True

    def commit(self, proposal: Proposal, masked: torch.Tensor, states: Any) -> Commit:
        if any(state.steps >= 2 for state in states):
            raise ZeroDivisionError("a decoder's own fault")
        first = masked & (masked.cumsum(1) == 1)
        return Commit(first, proposal.tokens)


@dataclass(frozen=True)
class Idle(Raises):
    """A decoder that commits nothing."""

    def commit(self, proposal: Proposal, masked: torch.Tensor, states: Any) -> Commit:
        return Commit(torch.zeros_like(masked), proposal.tokens)


@dataclass(frozen=True)
class Endless(Raises):
    """A decoder that takes back what it sets."""

    monotone: ClassVar[bool] = False

    def commit(self, proposal: Proposal, masked: torch.Tensor, states: Any) -> Commit:
        first = masked & (masked.cumsum(1) == 1)
        assert proposal.editable is not None
        back = proposal.editable & ~masked
        return Commit(first | back, proposal.tokens, back, torch.ones(len(masked)) > 0)


@dataclass(frozen=True)
class BadWindows:
    """An iteration that raises as soon as something is set."""

    def window(self, canvas: Canvas) -> Window | None:
        if not canvas.masked[canvas.answer]:
            raise LookupError("an iteration's own fault")
        return Window(canvas.answer, canvas.limit)


@dataclass(frozen=True)
class BadRows:
    """A cache policy whose rows are behind the canvas."""

    exact: ClassVar[bool] = False

    def allow(self, facts: ModelInfo) -> None:
        pass

    def plan(self, canvas: Canvas, window: Window, state: CacheState) -> StepPlan:
        return StepPlan(range(0, len(canvas) + 1000), len(canvas))


BROKEN = {
    "decoder": {"raises": Raises, "idle": Idle, "endless": Endless},
    "iteration": {"badwindows": BadWindows},
    "cache": {"badrows": BadRows},
}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers the broken strategies."""
    for kind, classes in BROKEN.items():
        for name, cls in classes.items():
            monkeypatch.setitem(registry._registered[kind], name, cls)
    registry.build.cache_clear()
    yield
    registry.build.cache_clear()


def run(engine: Engine, requests: list[Request]) -> dict[str, list[int] | Exception]:
    """Token ids of each request, or why it failed."""
    for one in requests:
        engine.add(one)
    found: dict[str, list[int] | Exception] = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, FailureEvent):
                found[event.id] = event.error
            elif isinstance(event, TextEvent) and event.output is not None:
                found[event.id] = event.output.token_ids
    return found


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("family", ["sdar", "llada"])
@pytest.mark.parametrize(
    "option,error",
    [
        ({"decoder": "raises"}, ZeroDivisionError),
        ({"decoder": "idle"}, EngineError),
        ({"iteration": "badwindows"}, LookupError),
        ({"cache": "badrows"}, EngineError),
    ],
)
def test_a_broken_strategy_ends_its_own_request(
    make_engine: Callable[..., Engine], family: str, option: dict[str, str], error: type[Exception]
) -> None:
    engine = make_engine(family)
    others = [request(f"o{i}", [*PROMPT, i], SamplingParams(max_tokens=12)) for i in range(5)]
    alone = {name: out.token_ids for name, out in serve(make_engine(family), others).items()}
    bad = request("bad", PROMPT, SamplingParams(max_tokens=12, **option))
    found = run(engine, [*others[:2], bad, *others[2:]])
    assert isinstance(found.pop("bad"), error)
    assert found == alone
    check_unharmed(engine, lambda: make_engine(family))


@pytest.mark.usefixtures("broken")
def test_what_never_ends_ends(make_engine: Callable[..., Engine]) -> None:
    """Ends within a number of steps that grows with the length of the answer alone."""
    for spec in ("edit:threshold=0:edit=0:rounds=1024", "endless"):
        engine = make_engine("llada")
        asked = request("a", PROMPT, SamplingParams(max_tokens=24, decoder=spec, ignore_eos=True))
        found = serve(engine, [asked])["a"]
        assert len(found.token_ids) == 24
        assert found.stats.forward_passes <= 8 * 24 + 64 + 24 + 1
        check_unharmed(engine, lambda: make_engine("llada"))
    with pytest.raises(DinferError, match="between 0 and 1024"):
        make_engine("llada").strategy(SamplingParams(decoder="edit:rounds=1000000000"))


@pytest.mark.parametrize(
    "spec", ["klass:steps=1" + "0" * 21, "wino:most=1" + "0" * 21, "localleap:radius=1" + "0" * 24,
             "dream:noise=1e-40", "localleap:radius=2000000000", "dual:refresh=-1"],
)  # fmt: skip
def test_numbers_that_overflowed_are_refused(make_engine: Callable[..., Engine], spec: str) -> None:
    kind = "cache" if spec.startswith("dual") else "decoder"
    with pytest.raises(DinferError, match=spec.split(":")[1].split("=")[0]):
        make_engine("llada").strategy(SamplingParams(**{kind: spec}))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("decoder", ["threshold", "fixed", "entropy", "dream", "wino"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_not_finite_are_no_text(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, value: float,
    decoder: str, temperature: float,
) -> None:  # fmt: skip
    engine = make_engine("llada")
    norm = engine.model.norm.weight
    params = SamplingParams(max_tokens=8, decoder=decoder, temperature=temperature)
    with monkeypatch.context() as patch:
        patch.setattr(norm, "data", torch.full_like(norm, value))
        found = run(engine, [request("a", PROMPT, params)])
    assert isinstance(found["a"], EngineError) and "not finite" in str(found["a"])
    check_unharmed(engine, lambda: make_engine("llada"))


@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**6))
def test_nobody_is_passed_over_for_ever(make_engine: Callable[..., Engine], seed: int) -> None:
    """An older request next to newcomers that fill each step, of random sizes and at random times:
    it is passed over at most PATIENCE + (running sequences) steps in a row, and so is each of them.
    """
    rng, most = random.Random(seed), 6
    engine = make_engine("llada", rows=rng.choice([40, 128]), sequences=most)
    victim = request("victim", PROMPT, SamplingParams(max_tokens=20, decoder="fixed"))
    engine.add(victim)
    passed, number, done = 0, 0, False
    for _ in range(400):
        while engine.load < rng.choice([2, 4, 8]):
            number += 1
            prompt = [7] * rng.choice([5, 30, 90])
            engine.add(request(f"n{number}", prompt, SamplingParams(max_tokens=rng.choice([1, 4]))))
        for event in engine.step():
            done |= event.id == "victim" and getattr(event, "output", None) is not None
        passed = max([passed, *(s.passed_over for s in engine.scheduler.running)])
        if done:
            break
    assert done and passed <= PATIENCE + most


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-sdar", dtype="float32", device="cpu")


TEXTS = [f"Tom has {n} apples. Then he buys 7 more. How many apples does Tom have now?"
         for n in (12, 5, 30)]  # fmt: skip


def test_two_streams_read_in_turns(llm: LLM) -> None:
    expected = [out.text for out in llm.generate(TEXTS[:2], SamplingParams(max_tokens=48))]
    streams = [llm.stream(text, SamplingParams(max_tokens=48)) for text in TEXTS[:2]]
    found, left = ["", ""], {0, 1}
    while left:
        for i in sorted(left):
            event = next(streams[i], None)
            if event is None:
                left.discard(i)
            elif isinstance(event, TextEvent):
                found[i] += event.text
    assert found == expected and not llm.engine.busy


def test_generate_within_a_stream(llm: LLM) -> None:
    expected = [out.text for out in llm.generate(TEXTS, SamplingParams(max_tokens=48))]
    text, inner = "", []
    for event in llm.stream(TEXTS[0], SamplingParams(max_tokens=48)):
        text += event.text if isinstance(event, TextEvent) else ""
        if not inner:
            inner = [out.text for out in llm.generate(TEXTS[1:], SamplingParams(max_tokens=48))]
    assert [text, *inner] == expected and not llm.engine.busy


def test_a_stream_that_is_left_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream(TEXTS[0], SamplingParams(max_tokens=48))
    next(stream)
    assert llm.engine.busy
    del stream
    assert not llm.engine.busy and llm.engine.pool.free == llm.engine.pool.pages


def test_threads_share_one_model(llm: LLM) -> None:
    params = SamplingParams(max_tokens=48)
    expected = [out.text for out in llm.generate(TEXTS, params)]
    found: list[list[str]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                found.append([out.text for out in llm.generate(TEXTS, params)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and found == [expected] * 18
    assert not llm.engine.busy and llm.engine.pool.free == llm.engine.pool.pages


def test_a_failing_request_raises_in_its_own_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("broken")
    with pytest.raises(ZeroDivisionError):
        llm.generate(TEXTS, SamplingParams(max_tokens=48, decoder="raises"))
    assert not llm.engine.busy and llm.engine.pool.free == llm.engine.pool.pages
    assert llm.generate(TEXTS[0], SamplingParams(max_tokens=48))[0].text.endswith("#### 19")


def test_stop_strings_take_few_decodings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of n tokens that a stop string cuts is decoded O(log n) times at its end."""
    tokenizer, calls = llm.tokenizer, 0
    assert tokenizer is not None
    decode = type(tokenizer).decode

    def counted(self: Any, ids: list[int]) -> str:
        nonlocal calls
        calls += len(ids) > 1
        return decode(self, ids)

    text = "a" * 300 + "END"
    ids = tokenizer.encode(text)
    monkeypatch.setattr(type(tokenizer), "decode", counted)
    kept = llm.engine._before_stop(ids, "a" * 300)
    assert decode(tokenizer, kept).startswith("a" * 300) and calls <= 12
    assert not decode(tokenizer, kept[:-1]).startswith("a" * 300)
