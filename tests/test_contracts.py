"""Every registered strategy is put through the same checks; a new file is found by itself."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.canvas import Canvas
from dinfer.engine.engine import Engine
from dinfer.errors import RequestError
from dinfer.registry import build, find, names, spec_of
from dinfer.request import SamplingParams
from dinfer.step import NUM_TOP, CacheState, Decoder, ModelInfo, Proposal, WindowState

from .conftest import FAMILIES, allows, decoder_for, request, serve

DECODERS, CACHES, ITERATIONS = names("decoder"), names("cache"), names("iteration")
MASK = 99


def random_proposal(rng: torch.Generator, masked: torch.Tensor) -> Proposal:
    batch, width = masked.shape

    def uniform() -> torch.Tensor:
        return torch.rand(batch, width, generator=rng)

    logits = torch.randn(batch, width, 20, generator=rng)
    tokens = torch.randint(0, 20, (batch, width), generator=rng)
    top = logits.softmax(dim=2).topk(NUM_TOP, dim=2)
    fixed = torch.rand(batch, width, generator=rng) < 0.3
    return Proposal(
        tokens,
        *(uniform() for _ in range(4)),
        logits,
        *(uniform() for _ in range(3)),
        top.indices,
        top.values,
        ~masked & ~fixed,
        torch.randint(0, 20, (batch, width), generator=rng),
        uniform(),
        torch.randint(0, 20, (batch, width), generator=rng),
    )


def rows_of(proposal: Proposal, rows: slice) -> Proposal:
    return Proposal(*(getattr(proposal, field)[rows] for field in Proposal.__dataclass_fields__))


@pytest.mark.parametrize("name", DECODERS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 5), width=st.integers(1, 12))
def test_decoder(name: str, seed: int, batch: int, width: int) -> None:
    """Commits masked positions, one at least where there is one, in any batch; only those that are
    not monotone touch set positions, and never given text. Those that draft commit in their last
    step.
    """
    rng = torch.Generator().manual_seed(seed)
    decoder = build("decoder", name)
    masked = torch.rand(batch, width, generator=rng) < 0.6
    proposal = random_proposal(rng, masked)
    assert proposal.editable is not None
    opened = masked.sum(dim=1).tolist()
    drafts = getattr(decoder, "drafts", False)

    def states(some: list[int]) -> list[WindowState]:
        return [WindowState(max(1, n), decoder.steps - 1 if drafts else 0) for n in some]

    commit = decoder.commit(proposal, masked, states(opened))
    assert commit.mask.shape == commit.tokens.shape == masked.shape
    touched = commit.mask if commit.back is None else commit.mask | commit.back
    assert not (touched & ~masked & ~proposal.editable).any()
    assert not decoder.monotone or not (touched & ~masked).any()
    assert not decoder.monotone or commit.open is None
    assert commit.back is None or not (commit.back & (masked | commit.mask)).any()
    assert ((commit.mask & masked).any(dim=1) == masked.any(dim=1)).all()
    assert (commit.draft is not None) == drafts
    again = decoder.commit(proposal, masked, states(opened))
    assert torch.equal(commit.mask, again.mask)
    for row in range(batch):
        part = slice(row, row + 1)
        alone = decoder.commit(rows_of(proposal, part), masked[part], states(opened[part]))
        assert torch.equal(alone.mask[0], commit.mask[row])
        assert torch.equal(alone.tokens[0][alone.mask[0]], commit.tokens[row][commit.mask[row]])


class Asked:
    """A decoder of which the engine knows no rule."""

    def __init__(self, decoder: Decoder) -> None:
        self.commit, self.needs, self.monotone = decoder.commit, decoder.needs, decoder.monotone


RULES = ["threshold", "threshold:strict=true", "threshold:threshold=0.0", "hierarchy:threshold=0.5"]


@pytest.mark.parametrize("iteration", ["blockwise:length=8", "multiblock:length=8"])
@pytest.mark.parametrize("spec", RULES)
def test_a_rule_changes_no_answer(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, spec: str, iteration: str
) -> None:
    """The engine asks the rule, or `commit`: same tokens, same steps."""

    def answers() -> dict[str, tuple[list[int], list[float] | None, int]]:
        asked = [
            request(
                str(n),
                list(range(5, 9 + n)),
                SamplingParams(
                    20 + n,
                    temperature=0.7 * (n % 2),
                    decoder=spec if n % 3 else "hierarchy",
                    iteration=iteration,
                    logprobs=True,
                    ignore_eos=True,
                ),
            )
            for n in range(6)
        ]
        served = serve(make_engine("llada"), asked)
        return {
            name: (output.token_ids, output.logprobs, output.stats.forward_passes)
            for name, output in served.items()
        }

    by_rule, strategy = answers(), Engine.strategy
    monkeypatch.setattr(
        Engine,
        "strategy",
        lambda engine, params: replace(s := strategy(engine, params), decoder=Asked(s.decoder)),
    )
    assert answers() == by_rule


@settings(deadline=None, max_examples=60)
@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30), st.integers(0, 31))
def test_canvas_knows_where_its_given_text_ends(given: list[bool], length: int, place: int) -> None:
    canvas = Canvas([7 if fixed else None for fixed in given], 0, len(given), MASK, None)
    assert canvas.given_from(place) == any(given[place:])
    canvas.cut(length)
    assert canvas.given_from(place) == any(given[:length][place:])


@pytest.mark.parametrize("name", ITERATIONS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), answer=st.integers(0, 20), length=st.integers(0, 70))
def test_iteration_covers_the_canvas_and_ends(
    name: str, seed: int, answer: int, length: int
) -> None:
    rng = np.random.default_rng(seed)
    blank = rng.random(length) < 0.7
    tokens = [7] * answer + [None if hole else 7 for hole in blank]
    canvas = Canvas(tokens, answer, len(tokens), MASK, None)
    iteration = build("iteration", name)
    for _ in range(len(tokens) + 1):
        window = iteration.window(canvas)
        if window is None:
            break
        assert 0 <= window.start < window.stop <= len(canvas)
        undecided = canvas.undecided(window.start, window.stop)
        assert canvas.first_masked() in undecided
        canvas.write(rng.choice(undecided, 1), np.array([3]))
    assert not canvas.masked.any()


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("block", [None, 8])
def test_cache_runs_what_is_undecided_and_sees_only_what_ran(name: str, block: int | None) -> None:
    policy, iteration = build("cache", name), build("iteration", "blockwise:length=8:aligned=true")
    facts = ModelInfo(MASK, frozenset(), block, 40, "blockwise", "none", "fixed")
    try:
        policy.allow(facts)
    except RequestError:
        pytest.skip("refused for such models")
    rng = np.random.default_rng(3)
    canvas = Canvas([7] * 13 + [None] * 27, 13, 40, MASK, block)
    state, ran = CacheState(), np.zeros(40, bool)
    while (window := iteration.window(canvas)) is not None:
        undecided = canvas.undecided(window.start, window.stop)
        plan = policy.plan(canvas, window, state)
        assert set(undecided.tolist()) <= set(plan.rows)
        ran[plan.index] = True
        assert ran[: plan.visible].all()
        canvas.stale[plan.index] = False
        canvas.write(
            rng.choice(undecided, min(3, len(undecided)), replace=False),
            np.array([3] * min(3, len(undecided))),
        )


PROMPTS = [[5, 9, 200, 31, 8], [], list(range(40, 57)), [7] * 8, [11] * 33]


def answers(engine: Engine, **options: object) -> list[list[int]]:
    params = SamplingParams(max_tokens=21, ignore_eos=True, **options)  # type: ignore[arg-type]
    outputs = serve(engine, [request(str(i), p, params) for i, p in enumerate(PROMPTS)])
    return [outputs[str(i)].token_ids for i in range(len(PROMPTS))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", CACHES)
def test_cache_on_models(make_engine: Callable[..., Engine], family: str, cache: str) -> None:
    """No unwritten (NaN) row is read; exact policies, and refresh at every step, give the uncached
    tokens.
    """
    engine = make_engine(family)
    if not allows(engine, cache=cache):
        with pytest.raises(RequestError, match="block-causal"):
            answers(engine, cache=cache)
        return
    decoder = decoder_for(engine, "threshold:threshold=0.5")
    plain = answers(engine, cache="none", decoder=decoder)
    found = answers(engine, cache=cache, decoder=decoder)
    assert all(0 <= token < 320 for tokens in found for token in tokens)
    if find("cache", cache).exact:
        assert found == plain
    if "refresh" in find("cache", cache).__dataclass_fields__:
        assert answers(engine, cache=f"{cache}:refresh=1", decoder=decoder) == plain
    assert engine.pool.free == engine.pool.pages


@pytest.mark.parametrize("iteration", ITERATIONS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_strategies_compose(
    make_engine: Callable[..., Engine], iteration: str, decoder: str
) -> None:
    """Any iteration with any decoder under the recommended cache, greedy and sampled: ends, fills
    all. The families that allow both take turns.
    """
    spec = f"{decoder}:steps=4" if decoder == "renoise" else decoder  # it takes them all
    options = {"iteration": iteration, "decoder": spec}
    fit = [family for family in FAMILIES if allows(make_engine(family), **options)]
    if not fit:
        assert (iteration, decoder) == ("smooth", "renoise")
        return
    family = fit[(ITERATIONS.index(iteration) + DECODERS.index(decoder)) % len(fit)]
    for temperature in (0.0, 1.0):
        found = answers(make_engine(family), temperature=temperature, **options)
        assert [len(tokens) for tokens in found] == [21] * len(PROMPTS)


def test_block_runs_fewer_rows_and_no_extra_forward(make_engine: Callable[..., Engine]) -> None:
    params = {c: SamplingParams(max_tokens=40, ignore_eos=True, cache=c) for c in ("none", "block")}
    outputs = {
        c: serve(make_engine("sdar"), [request("a", list(range(30)), p)])["a"]
        for c, p in params.items()
    }
    plain, cached = outputs["none"], outputs["block"]
    assert cached.token_ids == plain.token_ids
    assert cached.stats.forward_passes == plain.stats.forward_passes
    assert cached.stats.rows_run < plain.stats.rows_run / 3


@pytest.mark.parametrize("kind", ["decoder", "cache", "iteration"])
def test_spec_strings_round_trip(kind: str) -> None:
    for name in names(kind):
        assert build(kind, spec_of(name, build(kind, name))) == build(kind, name)
