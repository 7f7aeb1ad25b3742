"""Classifier-free guidance against two plain passes of the model, and in mixed batches."""

from collections.abc import Callable

import pytest
import torch

from dinfer.engine.engine import Engine
from dinfer.errors import RequestError
from dinfer.kernel.sampling import Guidance, SamplingExtras, propose
from dinfer.request import SamplingParams

from ..conftest import request, serve
from ..kernel.test_kernels import head_of, sampling


def test_guided_logits_row_by_row() -> None:
    """150 rows, of which every seventh is guided with a scale of its own."""
    torch.manual_seed(1)
    head = head_of(torch.randn(40, 6) * 0.4)
    hidden, without = torch.randn(150, 6), torch.randn(150, 6)
    rows = torch.arange(0, 150, 7)
    scale = torch.rand(len(rows)) * 3
    found = propose(
        hidden,
        head,
        39,
        ("logits",),
        sampling(150),
        SamplingExtras(guidance=Guidance(rows.numpy(), without[rows], scale)),
    )
    expected = head(hidden)
    for row, w in zip(rows.tolist(), scale.tolist(), strict=True):
        u, c = head(without[row]), head(hidden[row])
        expected[row] = u + (w + 1) * (c - u)
    expected[:, 39] = -torch.inf
    torch.testing.assert_close(found["logits"], expected)
    torch.testing.assert_close(found["confidence"], expected.softmax(dim=1).amax(dim=1))


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_guided_and_plain_requests_share_a_batch(
    make_engine: Callable[..., Engine], family: str
) -> None:
    """The same tokens as alone; twice the rows; pages come back."""
    requests = [
        request(f"{w}-{n}", list(range(n)), SamplingParams(max_tokens=12, guidance=w, seed=n))
        for w in (0.0, 1.5)
        for n in (3, 17, 40)
    ]
    alone = {r.id: serve(make_engine(family), [r])[r.id] for r in requests}
    engine = make_engine(family, rows=200)
    together = serve(engine, requests)
    assert {k: o.token_ids for k, o in together.items()} == {
        k: o.token_ids for k, o in alone.items()
    }
    assert engine.pool.free == engine.pool.pages
    assert any(alone[f"0.0-{n}"].token_ids != alone[f"1.5-{n}"].token_ids for n in (3, 17, 40))
    for cache in ("none", "prefix"):
        rows = []
        for w in (0.0, 1e-9):  # as good as unguided, so the same steps
            params = SamplingParams(max_tokens=9, guidance=w, cache=cache)
            rows.append(serve(make_engine(family), [request("a", [5] * 20, params)])["a"].stats)
        assert rows[1].rows_run == 2 * rows[0].rows_run


@pytest.mark.parametrize("guidance", [-0.5, float("nan"), float("inf"), "1", True])
def test_bad_guidance(guidance: object) -> None:
    with pytest.raises(RequestError, match=r"guidance is .* from 0"):
        SamplingParams(guidance=guidance)  # type: ignore[arg-type]
