"""What must hold after an attack on an engine: it serves others as a fresh one would."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

from dinfer.engine.engine import Engine
from dinfer.request import Request, SamplingParams

from .conftest import request, serve

ORDINARY = 52
"""Ordinary requests that are served after each attack."""


_expected: WeakKeyDictionary[nn.Module, dict[str, list[int]]] = WeakKeyDictionary()
"""What a fresh engine of each model answers; found once."""


def ordinary(count: int = ORDINARY) -> list[Request]:
    """Requests of many lengths, temperatures and seeds; several share the beginning of a text."""
    shared = [i % 50 + 10 for i in range(70)]
    return [
        request(
            f"ordinary-{i}",
            shared[: 7 + i] if i % 3 else [i % 40 + 5] * (1 + i % 9),
            SamplingParams(max_tokens=1 + i % 12, temperature=(i % 2) * 0.8, seed=i),
        )
        for i in range(count)
    ]


def check_unharmed(engine: Engine, fresh: Callable[[], Engine]) -> None:
    """The engine answers ordinary requests with the tokens of a fresh one, and holds no page of
    the requests before.
    """
    assert not engine.busy and engine.pool.free == engine.pool.pages
    if engine.model not in _expected:
        _expected[engine.model] = _served(fresh())
    assert _served(engine) == _expected[engine.model]
    assert engine.pool.free == engine.pool.pages


def _served(engine: Engine) -> dict[str, list[int]]:
    return {name: output.token_ids for name, output in serve(engine, ordinary()).items()}
