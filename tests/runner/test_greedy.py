"""The short way through a step gives what the general one gives."""

from typing import Any

import numpy as np
import pytest
import torch

from dinfer.engine.engine import Engine
from dinfer.errors import EngineError
from dinfer.request import SamplingParams
from dinfer.runner.greedy import GreedyStep

from ..conftest import request, serve
from ..engine.test_attacks import run
from .test_native_cpu import engine_of, loaded

pytestmark = pytest.mark.usefixtures("native")

SPECS: list[dict[str, Any]] = [
    {"decoder": "threshold:threshold=0.01"},
    {"decoder": "hierarchy:threshold=0.02:low=0.01", "iteration": "blockwise:length=8"},
    {"decoder": "threshold:threshold=0.02:strict=true", "cache": "none"},
    {"decoder": "threshold:threshold=0.02", "iteration": "sliding:length=16:stride=4"},
]


def answers(engine: Engine) -> dict[str, tuple[list[int], int]]:
    """Tokens and steps of requests with each of the strategies, of some lengths, half of which may
    end early.
    """
    requests = [
        request(
            f"{number}, {fills}",
            [(7 * p + number) % 290 for p in range(5 + 9 * number)],
            SamplingParams(max_tokens=12 + 7 * number, ignore_eos=fills, **spec),
        )
        for number, spec in enumerate(SPECS)
        for fills in (False, True)
    ]
    found = serve(engine, requests)
    return {name: (x.token_ids, x.stats.forward_passes) for name, x in found.items()}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that took the short way."""
    sizes: list[int] = []
    way = GreedyStep.run

    def counted(self: GreedyStep, batch: Any) -> Any:
        sizes.append(len(batch))
        return way(self, batch)

    monkeypatch.setattr(GreedyStep, "run", counted)
    return sizes


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llada", "sdar", "sdar_moe"])
def test_both_ways_give_the_same(
    taken: list[int], name: str, dtype: torch.dtype, quant: str | None
) -> None:
    given = loaded(name, dtype, quant)
    short = answers(engine_of(given))
    assert max(taken) > 1
    taken.clear()
    engine = engine_of(given)
    engine.greedy = None
    assert answers(engine) == short and not taken


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 0.5},
        {"decoder": "fixed"},
        {"decoder": "wino"},
        {"guidance": 1.0},
        {"iteration": "adablock"},
        {"top_logprobs": 2},
    ],
)
def test_who_wants_more_takes_the_general_way(taken: list[int], wish: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 12, "decoder": "threshold:threshold=0.01"} | wish)
    serve(engine_of(loaded("llada")), [request("a", [3, 4, 5], params)])
    assert not taken


def test_a_rule_that_raises_ends_its_request_alone(taken: list[int]) -> None:
    good, bad = (
        request(name, [3, 4, 5], SamplingParams(max_tokens=16, decoder=f"threshold:threshold={t}"))
        for name, t in (("good", 0.02), ("bad", 0.03))
    )
    alone = run(engine_of(loaded("llada")), [good])["good"]
    engine = engine_of(loaded("llada"))
    engine.add(bad)
    (waiting,) = engine.scheduler.waiting
    vars(waiting.strategy.decoder)["rule"] = lambda places, confidence: places + 1000
    found = run(engine, [good])
    assert found["good"] == alone
    assert isinstance(found["bad"], IndexError)
    assert 2 in taken


def test_logits_that_are_not_finite_end_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(max_tokens=8, decoder="threshold")
    requests = [request("a", [3, 4], params), request("b", [5, 6, 7], params)]
    alone = run(engine_of(loaded("llada")), requests)["b"]
    compute = GreedyStep._compute

    def broken(self: GreedyStep, batch: Any) -> Any:
        asked = compute(self, batch)
        if batch[0].request.id == "a":
            self._probs.array[: len(asked[0])] = np.nan
        return asked

    monkeypatch.setattr(GreedyStep, "_compute", broken)
    found = run(engine_of(loaded("llada")), requests)
    assert isinstance(found["a"], EngineError) and "not finite" in str(found["a"])
    assert found["b"] == alone
