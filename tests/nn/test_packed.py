"""Weights in oneDNN's layout: the products of the plain ones."""

import pytest
import torch
from torch.nn.functional import linear

from dinfer import LLM
from dinfer.kernel.greedy import PIECE
from dinfer.nn.packed import Packed, packs
from dinfer.nn.quantized import QuantizedHead

from ..conftest import FAMILIES, GOLDEN, golden_facts

DTYPES = [torch.float32, torch.bfloat16]
IDS = list(range(5, 45))
pytestmark = pytest.mark.skipif(
    not packs(torch.device("cpu"), torch.float32), reason="weights are not packed on this machine"
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out,size", [(768, 256), (40, 24), (1, 64)])
def test_products(out: int, size: int, dtype: torch.dtype) -> None:
    if not packs(torch.device("cpu"), dtype):
        with pytest.raises(RuntimeError):  # so it is rightly left alone
            Packed().product(torch.zeros(out, size, dtype=dtype), torch.empty(out, 0))
        return
    weight, x = torch.randn(out, size, dtype=dtype), torch.randn(50, size, dtype=dtype)
    product = Packed().product(*Packed().quantize(weight))
    exact = linear(x.double(), weight.double())
    # Sums in float32 (the bound of a sum's rounding), then one rounding to the dtype.
    allowed = (
        size * torch.finfo(torch.float32).eps * linear(x.double().abs(), weight.double().abs())
    )
    allowed += torch.finfo(dtype).eps * exact.abs()
    assert ((product(x) - exact).abs() <= allowed).all()
    assert product(x[:0]).shape == (0, out)


def test_a_head_in_pieces() -> None:
    weight, x = torch.randn(PIECE + 100, 16), torch.randn(3, 16)
    head = QuantizedHead(Packed(), 16, len(weight))
    head.weight.copy_(weight)
    head.finalize()
    exact = linear(x, weight)
    assert torch.allclose(head(x), exact, atol=1e-5)
    assert torch.allclose(head.columns(x, PIECE, PIECE + 100), exact[:, PIECE:], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or plain, a model gives the same logits but for rounding; only tied heads and what is
    no linear layer stay plain.
    """

    def load() -> LLM:
        facts = golden_facts(family)
        return LLM(GOLDEN / family, "float32", "cpu", facts=facts, compiled=False)

    packed = load()
    monkeypatch.setattr("dinfer.loader.load.packs", lambda device, dtype: False)
    plain = load()
    assert (packed.logits(IDS) - plain.logits(IDS)).abs().max() < 1e-4
    kept = {name for name, _ in packed.loaded.model.layers.named_parameters()}
    assert not [n for n in kept if n.endswith(("qkv.weight", "gate_up.weight", "down.weight"))]
    assert any(n.endswith("qkv.weight") for n, _ in plain.loaded.model.layers.named_parameters())
