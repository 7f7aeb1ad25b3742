"""Kernels against plain references."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.attention.sdpa import Segment, attention, attention_reference, by_size, grouped
from dinfer.kernel.noise import random_tokens, uniform
from dinfer.kernel.sampling import GROUP, RowSampling, SamplingExtras, propose
from dinfer.nn.linear import Linear

V, MASK = 50, 7


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6), group=st.sampled_from([1, 2, 4]), kv_heads=st.sampled_from([1, 3])
)
def test_attention(seed: int, group: int, kv_heads: int) -> None:
    torch.manual_seed(seed)
    slots, rows, size = 70, 23, 16
    q = torch.randn(rows, kv_heads * group, size)
    keys, values = torch.randn(slots, kv_heads, size), torch.randn(slots, kv_heads, size)
    scattered = np.random.default_rng(seed).permutation(slots)[:17]
    # The first, the third and the last have one size.
    spans = [
        Segment(0, 5, slice(3, 20)),
        Segment(5, 6, slice(0, 1)),
        Segment(6, 11, scattered),
        Segment(11, 18, scattered[:9]),
        Segment(18, 23, slice(50, 67)),
    ]
    # Those of one size share a call, with a mask each; every row sees something.
    seen = np.random.default_rng(seed).random((3, 5, 17)) < 0.5
    seen[:, :, 0] = True
    masked = [replace(spans[0], seen=seen[0]), spans[1], replace(spans[2], seen=seen[1])]
    masked += [spans[3], replace(spans[4], seen=seen[2])]
    for each in (masked, spans, spans[:1], []):
        some = q[: each[-1].stop if each else 0]
        truth = attention_reference(some, keys, values, each)
        for groups in (grouped(each, q.device), by_size(each, q.device)):
            torch.testing.assert_close(attention(some, keys, values, groups), truth)


def test_random_tokens_are_uniform_and_apart_from_other_noise() -> None:
    n, vocab, zero = 30_000, 30, torch.zeros(30_000, dtype=torch.int64)
    places = torch.arange(n)
    draws = random_tokens(zero, places, zero, vocab)
    counts = torch.bincount(draws, minlength=vocab)
    assert len(counts) == vocab
    assert (counts - n / vocab).abs().max() < 5 * math.sqrt(n / vocab)
    others = (uniform(zero, places, zero, 1)[:, 0], random_tokens(zero, places, zero + 1, vocab))
    for other in others:
        both = torch.stack((draws.float(), other.float()))
        assert torch.corrcoef(both)[0, 1].abs() < 4 / math.sqrt(n)
    assert torch.equal(random_tokens(zero[:3], places[7:10], zero[:3], vocab), draws[7:10])


def test_the_largest_noise_is_below_one() -> None:
    """This seed's first number has all bits set; rounded to 1 it would make any token win."""
    zero = torch.zeros(1, dtype=torch.int64)
    largest = uniform(zero + 4315042, zero, zero, 1).item()
    assert largest == 1 - 2.0**-24


def test_noise_is_uniform_and_keyed_by_seed_position_and_step() -> None:
    n = 20_000
    zero = torch.zeros(1, dtype=torch.int64)
    draws = uniform(zero, zero, zero, n)[0]
    assert draws.min() > 0 and draws.max() < 1
    assert abs(draws.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    counts = torch.histc(draws, 10, 0, 1)
    assert (counts - n / 10).abs().max() < 5 * math.sqrt(n * 0.09)
    lag = torch.corrcoef(torch.stack((draws[:-1], draws[1:])))[0, 1].abs()
    assert lag < 4 / math.sqrt(n)
    keys = torch.arange(300)
    for a, b, c in ((keys, zero, zero), (zero, keys, zero), (zero, zero, keys)):
        a, b, c = (x.expand(300) for x in (a, b, c))
        first = uniform(a, b, c, 1)[:, 0]
        assert len(set(first.tolist())) == 300
        assert abs(first.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / 300)
    alone = uniform(keys[5:6], keys[9:10], keys[2:3], 8)
    among = uniform(keys[5:8], keys[9:12], keys[2:5], 8)
    assert torch.equal(alone[0], among[0])


def sampling(
    rows: int, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0
) -> RowSampling:
    return RowSampling(
        temperature == 0,
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        torch.zeros(rows, dtype=torch.int64),
        torch.arange(rows),
        torch.zeros(rows, dtype=torch.int64),
    )


def head_of(weight: torch.Tensor) -> Linear:
    head = Linear(weight.shape[1], weight.shape[0])
    head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return head


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.double().clone()
    logits[:, MASK] = -torch.inf
    return logits.softmax(dim=1)


@pytest.mark.parametrize("rows", [1, GROUP, GROUP + 1, 200])
def test_greedy_proposal(rows: int) -> None:
    torch.manual_seed(rows)
    head = head_of(torch.randn(V, 8))
    hidden = torch.randn(rows, 8)
    with torch.no_grad():
        found = propose(hidden, head, MASK, {"entropy", "margin", "noise"}, sampling(rows))
        p = probabilities(head(hidden))
    assert torch.equal(found["tokens"], p.argmax(dim=1))
    torch.testing.assert_close(found["confidence"].double(), p.amax(dim=1), atol=1e-6, rtol=1e-5)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(dim=1)
    torch.testing.assert_close(found["entropy"].double(), entropy, atol=1e-5, rtol=1e-5)
    two = p.topk(2, dim=1).values
    torch.testing.assert_close(
        found["margin"].double(), two[:, 0] - two[:, 1], atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.7, 0), (1.4, 1.0, 5)]
)
def test_sampled_frequencies(temperature: float, top_p: float, top_k: int) -> None:
    """20,000 draws from one distribution against its filtered probabilities (chi-square)."""
    torch.manual_seed(1)
    rows = 20_000
    logits = torch.randn(1, V) * 2
    head = head_of(torch.eye(V))
    found = propose(
        logits.repeat(rows, 1), head, MASK, (), sampling(rows, temperature, top_p, top_k)
    )
    raw = probabilities(logits)[0]
    kept = probabilities(logits / temperature)[0]
    order = kept.argsort(descending=True)
    if top_k:
        kept[order[top_k:]] = 0
    below = kept[order].cumsum(0) - kept[order]
    kept[order[below >= top_p * kept.sum()]] = 0
    kept /= kept.sum()
    counts = torch.bincount(found["tokens"], minlength=V).double()
    assert counts[kept == 0].sum() == 0
    likely = kept * rows > 5
    chi = ((counts - kept * rows) ** 2 / (kept * rows))[likely].sum().item()
    degrees = int(likely.sum()) - 1
    assert chi < degrees + 5 * math.sqrt(2 * max(degrees, 1))
    # Confidence is the raw probability of what was drawn, whatever the temperature.
    torch.testing.assert_close(
        found["confidence"].double(), raw[found["tokens"]], atol=1e-6, rtol=1e-4
    )


def test_forbidden_tokens_are_not_chosen_and_leave_the_confidence_alone() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    allowed = torch.tensor([[False, True, True, True]])
    head = head_of(torch.eye(4))
    for needs in (set(), {"entropy"}):
        found = propose(logits, head, 3, needs, sampling(1), SamplingExtras(allowed))
        check_forbidden(found)


def check_forbidden(found: dict[str, torch.Tensor]) -> None:
    assert found["tokens"].tolist() == [1]
    expected = math.exp(2) / (math.exp(3) + math.exp(2) + math.exp(1))
    assert found["confidence"].item() == pytest.approx(expected, rel=1e-5)
