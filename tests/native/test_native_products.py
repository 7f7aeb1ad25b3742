"""Products and the head's search of our own kernels, with AMX's tiles and without."""

import pytest
import torch
from torch.nn.functional import linear

from dinfer.kernel.int8 import linear_int8_reference, quantize_rows
from dinfer.native import build, products
from dinfer.native.products import Product, Search

pytestmark = pytest.mark.skipif(not build.able(), reason="this machine cannot run the kernels")
SIZES = [(1, 64, 32), (15, 256, 768), (33, 640, 256), (100, 1024, 1000), (16, 128, 40)]
"""Rows, inputs, outputs: bands and panels that are full, and some that are not."""


@pytest.fixture(params=["tiles", "vectors"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs on both kinds of instructions, where the CPU has both."""
    tiles = request.param == "tiles"
    if tiles and not build.has_tiles():
        pytest.skip("this CPU has no AMX")
    chosen = build.library(tiles)
    monkeypatch.setattr(products, "library", lambda: chosen)


def drawn(rows: int, size: int, out: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + size + out)
    x, weight = torch.randn(rows, size), torch.randn(out, size) * size**-0.5
    return x.bfloat16(), weight.bfloat16()


@pytest.mark.parametrize("rows,size,out", SIZES)
def test_bfloat16(rows: int, size: int, out: int) -> None:
    x, weight = drawn(rows, size, out)
    exact = linear(x.double(), weight.double())
    # Sums in float32, then one rounding.
    allowed = (
        size * torch.finfo(torch.float32).eps * linear(x.double().abs(), weight.double().abs())
    )
    allowed += torch.finfo(torch.bfloat16).eps * exact.abs()
    given = Product(weight, weight.new_empty(out, 0))(x)
    assert given.shape == (rows, out) and ((given - exact).abs() <= allowed).all()


@pytest.mark.parametrize("rows,size,out", SIZES)
def test_int8(rows: int, size: int, out: int) -> None:
    x, weight = drawn(rows, size, out)
    codes, scales = quantize_rows(weight)
    exact = linear_int8_reference(x.float(), codes, scales)  # rounded by nobody
    given = Product(codes, scales)(x).float()
    assert torch.allclose(given, exact, rtol=2**-8, atol=1e-6)


def test_a_row_does_not_know_the_others() -> None:
    x, weight = drawn(100, 256, 96)
    for product in (Product(weight, weight.new_empty(96, 0)), Product(*quantize_rows(weight))):
        whole = product(x)
        for rows in (slice(0, 1), slice(7, 20), slice(40, 100)):
            assert torch.equal(product(x[rows].clone()), whole[rows])


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_search(rows: int, quantized: bool) -> None:
    x, weight = drawn(rows, 128, 900)
    weight = weight * 6  # some rows are sure of their token
    cuts = [weight[:512], weight[512:]]  # the second piece does not fill its panels
    made = [Product(*(quantize_rows(w) if quantized else (w, w.new_empty(0)))) for w in cuts]
    logits = linear(x.double(), weight.double())
    if quantized:
        logits = linear_int8_reference(x.float(), *quantize_rows(weight)).double()
    for mask in (None, 0, 700, int(logits[0].argmax())):
        masked = logits.clone()
        if mask is not None:
            masked[:, mask] = -torch.inf
        tokens, chances = Search(made)(x, mask)
        assert torch.equal(tokens, masked.argmax(dim=1))
        assert torch.allclose(chances.double(), masked.softmax(dim=1).amax(dim=1), rtol=1e-4)
        some = torch.arange(rows - 1, -1, -3)
        for part, whole in zip(Search(made)(x, mask, some), (tokens, chances), strict=True):
            assert torch.equal(part, whole[some])


def test_search_takes_the_first_of_equals() -> None:
    x, weight = drawn(3, 64, 320)
    weight[200] = weight[37] = weight[290] = 4 * x[0].sign()
    tokens, _ = Search([Product(weight, weight.new_empty(0))])(x[:1], None)
    assert tokens.tolist() == [37]


def test_no_rows() -> None:
    """As where every row of a batch is sampled."""
    x, weight = drawn(3, 64, 320)
    product = Product(weight, weight.new_empty(0))
    tokens, chances = Search([product])(x[:0], 5)
    assert tokens.shape == chances.shape == (0,) and product(x[:0]).shape == (0, 320)
