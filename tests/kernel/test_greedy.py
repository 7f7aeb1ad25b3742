"""The likeliest token in pieces of the vocabulary, against a softmax in float64."""

import pytest
import torch

from dinfer.kernel import greedy as module
from dinfer.kernel.greedy import greedy_tokens
from dinfer.kernel.sampling import RowSampling, propose
from dinfer.nn.linear import Linear

V, MASK = 50, 17


def head_of(seed: int) -> Linear:
    head = Linear(8, V)
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, 8, generator=torch.Generator().manual_seed(seed)))
    return head.requires_grad_(False)


@pytest.mark.parametrize("piece", [1, 7, 25, 49, 50, 8192])
@pytest.mark.parametrize("rows", [1, 5, module.GROUP + 3])
@pytest.mark.parametrize("free", [True, False])
def test_any_piece_gives_the_softmax(
    piece: int, rows: int, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    head, hidden = head_of(piece), torch.randn(rows, 8) * 3
    allowed = torch.rand(rows, V) < (1.0 if free else 0.3)
    allowed[:, 0] = True
    tokens, probabilities = greedy_tokens(hidden, head, MASK, None if free else allowed)
    logits = hidden.double() @ head.weight.double().T
    logits[:, MASK] = -torch.inf
    assert torch.equal(tokens, logits.masked_fill(~allowed, -torch.inf).argmax(dim=1))
    expected = logits.softmax(dim=1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(probabilities.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("piece", [7, 17, 50])
def test_a_probability_does_not_depend_on_what_else_is_asked(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, so that a request's batch mates cannot change its tokens."""
    monkeypatch.setattr(module, "PIECE", piece)
    head, hidden = head_of(1), torch.randn(70, 8)
    some = torch.zeros(70, dtype=torch.int64)
    sampling = RowSampling(True, some.float(), some + 1.0, some, some, some, some)
    plain = propose(hidden, head, MASK, (), sampling)
    for needs in ({"entropy"}, {"top"}, {"noise", "margin"}):
        found = propose(hidden, head, MASK, needs, sampling)
        assert torch.equal(found["tokens"], plain["tokens"])
        assert torch.equal(found["confidence"], plain["confidence"])


def test_of_equals_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 10)
    head = head_of(0)
    head.weight[[3, 33]] = head.weight[30].clone()
    hidden = head.weight[30:31] / head.weight[30].norm() * 30
    tokens, probabilities = greedy_tokens(hidden, head, MASK)
    assert tokens.tolist() == [3]
    assert probabilities.item() == pytest.approx(1 / 3, rel=1e-3)


def test_no_rows() -> None:
    tokens, probabilities = greedy_tokens(torch.empty(0, 8), head_of(0), MASK)
    assert tokens.shape == probabilities.shape == (0,)
