"""Mixture layers against a loop over rows and experts in float64, and what they cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dinfer.kernel.grouped_gemm import grouped_linear, grouped_linear_reference
from dinfer.nn.moe import GroupedSigmoid, Mixture, MixtureMLP, Routing, Softmax

HIDDEN, EXPERTS, WIDE = 12, 8, 5
ROUTINGS = {
    "softmax": Softmax(top=3, normalised=False),
    "normalised": Softmax(top=3, normalised=True),
    "grouped": GroupedSigmoid(top=3, groups=4, kept=2, scale=2.5),
    "one group": GroupedSigmoid(top=3, groups=1, kept=1, scale=1.0),
}


def layer_of(routing: Routing, seed: int = 0, **more: object) -> MixtureMLP:
    biased = isinstance(routing, GroupedSigmoid)
    made = MixtureMLP(HIDDEN, Mixture(EXPERTS, WIDE, routing, biased=biased, **more))
    draws = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draws)
    return made.requires_grad_(False)


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up.double() @ x).chunk(2)
    return down.double() @ (gate * torch.sigmoid(gate) * up)


def chosen_by_hand(layer: MixtureMLP, x: Tensor) -> dict[int, float]:
    """Expert -> weight of one row, from the rules in words."""
    rule, logits = layer.router.routing, (layer.router.weight.double() @ x).tolist()
    if isinstance(rule, Softmax):
        scores = ranked = torch.tensor(logits).double().softmax(0).tolist()
        allowed = set(range(EXPERTS))
    else:
        scores = [1 / (1 + torch.tensor(-z).double().exp().item()) for z in logits]
        ranked = [s + b for s, b in zip(scores, layer.router.bias.tolist(), strict=True)]
        size = EXPERTS // rule.groups
        groups = [range(g * size, (g + 1) * size) for g in range(rule.groups)]
        worth = {g: sum(sorted(ranked[e] for e in group)[-2:]) for g, group in enumerate(groups)}
        kept = sorted(worth, key=lambda g: -worth[g])[: rule.kept]
        allowed = {e for g in kept for e in groups[g]}
    best = sorted(allowed, key=lambda e: -ranked[e])[: rule.top]
    total = sum(scores[e] for e in best)
    if isinstance(rule, Softmax):
        return {e: scores[e] / (total if rule.normalised else 1) for e in best}
    return {e: scores[e] / total * rule.scale for e in best}


@pytest.mark.parametrize("name", ROUTINGS)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), rows=st.integers(0, 20), shared=st.sampled_from([0, 7]))
def test_mixture_is_the_sum_over_experts(name: str, seed: int, rows: int, shared: int) -> None:
    layer = layer_of(ROUTINGS[name], seed, shared=shared)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    expected = torch.zeros(rows, HIDDEN, dtype=torch.float64)
    for row in range(rows):
        one = x[row].double()
        for e, weight in chosen_by_hand(layer, one).items():
            expected[row] += weight * mlp(one, layer.gate_up.weight[e], layer.down.weight[e])
        if layer.shared is not None:
            expected[row] += mlp(one, layer.shared.gate_up.weight, layer.shared.down.weight)
    torch.testing.assert_close(layer(x).double(), expected, atol=2e-4, rtol=2e-4)


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=9), seed=st.integers(0, 10**6))
def test_grouped_linear(counts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(sum(counts), 6), torch.randn(len(counts), 4, 6)
    found = grouped_linear(x, weight, torch.tensor(counts))
    expected = grouped_linear_reference(x, weight, torch.tensor(counts))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def operations(layer: MixtureMLP, rows: int) -> int:
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(rows, HIDDEN))
    return counter.get_total_flops()


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_the_cost_follows_the_active_parameters(rows: int) -> None:
    """Two operations for each active parameter and row, whatever the number of experts is, and the
    mix of the results. Experts that no row chose are not touched: theirs are NaN.
    """
    top = 3
    layer = layer_of(ROUTINGS["normalised"])
    active = top * 3 * HIDDEN * WIDE + EXPERTS * HIDDEN
    mix = top * HIDDEN
    assert operations(layer, rows) == 2 * rows * (active + mix)
    x = torch.randn(2, HIDDEN)
    used = layer.router(x)[1].unique().tolist()
    idle = [e for e in range(EXPERTS) if e not in used]
    expected = layer(x)
    layer.gate_up.weight[idle] = layer.down.weight[idle] = torch.nan
    assert idle and torch.equal(layer(x), expected)


def test_the_router_runs_in_float32() -> None:
    """A lead of one part in a thousand is lost in bfloat16 and must decide."""
    layer = layer_of(Softmax(top=1, normalised=False)).to(torch.bfloat16)
    weight = torch.zeros(EXPERTS, HIDDEN)
    weight[2, 0], weight[5, 0] = 1.0, 1.001
    layer.router.weight.data = weight
    assert layer.router(torch.ones(1, HIDDEN, dtype=torch.bfloat16))[1].item() == 5


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_in_a_graph_as_outside() -> None:
    """One graph for any number of rows; each layer runs with its own weights."""
    layers = [layer_of(ROUTINGS["grouped"], seed, shared=7) for seed in (1, 2)]

    def both(x: Tensor) -> Tensor:
        return layers[0](x) + layers[1](x)

    # Traced as the engine does; what is left out is only the slow part, C++ code.
    graph = torch.compile(both, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (5, 12, 33):
        x = torch.randn(rows, HIDDEN)
        torch.testing.assert_close(graph(x), both(x))
