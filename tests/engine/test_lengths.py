"""Prompts of every length that could be a special case, on every family."""

from collections.abc import Callable

import pytest

from dinfer.engine.engine import Engine
from dinfer.errors import RequestError
from dinfer.request import Request, SamplingParams

from ..conftest import FAMILIES, decoder_for, request, serve

ANSWER = 11


def requests_of(engine: Engine) -> list[Request]:
    """Lengths around a block, and the whole context."""
    block = engine.facts.block_length or 32
    lengths = [0, 1, block - 1, block, block + 1, engine.facts.context - ANSWER]
    decoder = decoder_for(engine, "threshold:threshold=0.5")
    params = SamplingParams(ANSWER, ignore_eos=True, decoder=decoder)
    return [
        request(str(length), [(7 * p + length) % 300 for p in range(length)], params)
        for length in sorted(set(lengths))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_any_length(make_engine: Callable[..., Engine], family: str) -> None:
    """All give whole answers, in a batch as alone (float32)."""
    engine = make_engine(family)
    requests = requests_of(engine)
    together = {name: out.token_ids for name, out in serve(engine, requests).items()}
    assert {name: len(tokens) for name, tokens in together.items()} == {
        one.id: ANSWER for one in requests
    }
    # Rows of nothing but masks are equal in exact arithmetic: their order is a matter of rounding.
    for one in requests[1:]:
        alone = serve(make_engine(family), [one])
        assert alone[one.id].token_ids == together[one.id], one.id


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_beyond_the_context_is_refused(
    make_engine: Callable[..., Engine], family: str
) -> None:
    engine = make_engine(family)
    long = [5] * (engine.facts.context - ANSWER + 1)
    with pytest.raises(RequestError, match=str(engine.facts.context)):
        engine.add(request("a", long, SamplingParams(ANSWER)))
