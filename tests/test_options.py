"""Options of strategies: every edge of a range is accepted, everything beyond it is refused."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import pytest

from dinfer import registry
from dinfer.errors import DinferError, RequestError
from dinfer.options import INT_MAX, Range, plain_type
from dinfer.registry import STRATEGIES, build, find, names

WILD = ["nan", "inf", "-inf", "1e400", "1" + "0" * 21, "-1" + "0" * 21]


def numbers() -> Iterator[tuple[str, str, str, Any]]:
    """Kind, name, option and type of every option that is a number."""
    for kind in STRATEGIES:
        for name in names(kind):
            cls = find(kind, name)
            hints = get_type_hints(cls, include_extras=True)
            for option in cls.__dataclass_fields__:
                if plain_type(hints[option]) in (int, float):
                    yield kind, name, option, hints[option]


NUMBERS = list(numbers())


@pytest.mark.parametrize("kind,name,option,hint", NUMBERS)
def test_edges(kind: str, name: str, option: str, hint: Any) -> None:
    (span,) = [x for x in hint.__metadata__ if isinstance(x, Range)]
    step = 1 if plain_type(hint) is int else 0.5
    for edge, beyond, left_out in (
        (span.low, span.low - step, span.above),
        (span.high, span.high + step, span.below),
    ):
        for value in (beyond, edge) if left_out else (beyond,):
            text = str(value if step != 1 else int(value))
            with pytest.raises(RequestError, match=f"The {kind} '{name}' has {option} "):
                build(kind, f"{name}:{option}={text}")
        if not left_out:
            try:
                build(kind, f"{name}:{option}={edge if step != 1 else int(edge)}")
            except RequestError as error:  # it must fit the others, too
                assert any(word in str(error) for word in ("at most", "divide", "low"))


@pytest.mark.parametrize("kind,name,option,hint", NUMBERS)
@pytest.mark.parametrize("text", WILD)
def test_wild_numbers(kind: str, name: str, option: str, hint: Any, text: str) -> None:
    with pytest.raises(DinferError, match=f"{kind} '{name}' (has {option}|is)"):
        build(kind, f"{name}:{option}={text}")


def test_tiny_numbers_are_refused() -> None:
    with pytest.raises(RequestError, match="too close to 0"):
        build("decoder", "dream:noise=1e-40")
    with pytest.raises(RequestError, match="at least 1e-06"):
        build("decoder", "dream:noise=1e-9")


def test_options_of_others_without_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Margin:
        lead: float = 0.0
        count: int = 1
        share: Annotated[float, Range(0, 1, above=True)] = 0.5

    monkeypatch.setitem(registry._registered, "decoder", {"margin": Margin})
    registry.build.cache_clear()
    assert build("decoder", f"margin:lead=-2.5:count={INT_MAX}") == Margin(-2.5, INT_MAX)
    for text in ("lead=nan", "lead=inf", "lead=1e38", f"count={INT_MAX + 1}", "share=0"):
        option = re.split("=", text)[0]
        with pytest.raises(RequestError, match=f"The decoder 'margin' has {option} "):
            build("decoder", f"margin:{text}")
    registry.build.cache_clear()


def test_a_range_says_what_it_allows() -> None:
    assert str(Range(0, 1)) == "between 0 and 1"
    assert str(Range(0, INT_MAX)) == "0 or more and at most 2147483647"
    assert str(Range(0, 1, above=True, below=True)) == "more than 0 and less than 1"
    assert math.nan not in Range(0, 1)
