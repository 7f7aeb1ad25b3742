"""A request's tokens do not depend on who else is served, when they came, or who was aborted
(float32, CPU).
"""

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dinfer.engine.engine import Engine
from dinfer.request import Request, SamplingParams, TextEvent

from ..conftest import FAMILIES, allows, request, serve

CACHES = [
    *("none", "prefix", "dual", "vicinity:left=4:right=2"),
    *("dual:refresh=3", "vicinity:warmup=2", "block", "subblock", "dkv", "interval:prompt=9"),
]
DECODERS = [
    *("fixed", "fixed:ranking=random:steps=5", "factor:factor=2.0"),
    *("threshold:threshold=0.4", "threshold:threshold=0.6:lead=true:least=2"),
    "entropy:bound=1",
    "hierarchy:threshold=0.5:low=0.2",
    "credit:threshold=0.5",
    "klass:threshold=0.3:divergence=0.5:steps=1",
    "localleap:anchor=0.4:threshold=0.2",
    "slowfast:threshold=0.4:explore=0.1",
    "dream:steps=6:noise=0.5",
    "wino:threshold=0.2:back=0.5",
    "remdm:steps=9:eta=0.4",
    "edit:threshold=0.3:edit=0.2:rounds=3",
    "renoise:steps=3:bound=2",
    "renoise:steps=6:entropy=0.5:stable=0",
]
ITERATIONS = [
    "blockwise:length=8",
    "blockwise:length=12:aligned=true",
    "sliding:length=10:stride=3",
    "pruned:length=8:ahead=1",
    "adablock:length=6:delimiter=84:threshold=0.01",
    "smooth:length=8",
    "subblock:block=16:length=4",
    "multiblock:length=8:add=0.2:ready=0.6:sure=0.3",
    "daedal:length=8:initial=8:by=4",
    "daedal:length=8:initial=9:begin_at=0:low=0.6",
    None,
]


def mixed(engine: Engine, seed: int, count: int) -> list[Request]:
    caches = [spec for spec in CACHES if allows(engine, cache=spec)]
    decoders = [spec for spec in DECODERS if allows(engine, decoder=spec)]
    iterations = [i for i in ITERATIONS if allows(engine, decoder=decoders[0], iteration=i)]
    guidance = [0.0, 0.0, 0.0, 1.2 if engine.facts.mask_id is not None else 0.0]
    rng = random.Random(seed)
    found = []
    for number in range(count):
        params = SamplingParams(
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.5,
            guidance=rng.choice(guidance),
            cache=rng.choice(caches),
            decoder=rng.choice(decoders),
            iteration=rng.choice(iterations),
        )
        # Not empty: the rows of a canvas of nothing but masks are equal in exact arithmetic, so
        # which is the most confident is a matter of rounding.
        prompt = [rng.randrange(300) for _ in range(rng.randint(1, 45))]
        found.append(request(f"{seed}-{number}", prompt, params))
    return found


def serve_in_disorder(
    engine: Engine, requests: list[Request], rng: random.Random
) -> dict[str, list[int]]:
    """Requests arrive between steps; some companions are aborted at a random step."""
    waiting, tokens, companions = list(requests), {}, 0
    rng.shuffle(waiting)
    while waiting or engine.busy:
        while waiting and rng.random() < 0.4:
            engine.add(waiting.pop())
        if rng.random() < 0.3 and companions < 8:
            companions += 1
            engine.add(
                request(
                    f"companion-{companions}",
                    [3] * rng.randint(0, 20),
                    SamplingParams(max_tokens=30),
                )
            )
        if rng.random() < 0.3 and companions:
            engine.abort(f"companion-{rng.randint(1, companions)}")
        for event in engine.step():
            if (
                isinstance(event, TextEvent)
                and event.output
                and not event.id.startswith("companion")
            ):
                tokens[event.id] = event.output.token_ids
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10**6))
def test_mixed_requests(make_engine: Callable[..., Engine], family: str, seed: int) -> None:
    requests = mixed(make_engine(family), seed, 16)
    alone = {r.id: serve(make_engine(family, pages=8), [r])[r.id].token_ids for r in requests}
    together = serve(make_engine(family, rows=300), requests)
    assert {name: output.token_ids for name, output in together.items()} == alone
    engine = make_engine(family, sequences=6, pages=24)
    assert serve_in_disorder(engine, requests, random.Random(seed)) == alone
    assert engine.pool.free == engine.pool.pages
