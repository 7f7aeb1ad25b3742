"""Products and the head's search of our own kernels, on every path that this machine has."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from dinfer.kernel.int4 import dequantize_groups, quantize_groups
from dinfer.kernel.int8 import linear_int8_reference, quantize_rows
from dinfer.native.products import Product, Search

pytestmark = pytest.mark.usefixtures("kernels")
SIZES = [(1, 64, 32), (15, 256, 768), (33, 640, 256), (100, 1024, 1000), (16, 128, 40), (7, 192, 1)]
"""Rows, inputs, outputs: bands, blocks and panels that are full, and some that are not."""
DTYPES = [torch.float32, torch.bfloat16]
HALF_ULP = {torch.float32: 2**-24, torch.bfloat16: 2**-9}


def drawn(rows: int, size: int, out: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + size + out)
    x, weight = torch.randn(rows, size), torch.randn(out, size) * size**-0.5
    return x.bfloat16(), weight.bfloat16()


def plain(weight: Tensor) -> Product:
    return Product(weight, weight.new_empty(len(weight), 0))


@pytest.mark.parametrize("rows,size,out", SIZES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain(dtype: torch.dtype, stored: torch.dtype, rows: int, size: int, out: int) -> None:
    x, weight = drawn(rows, size, out)
    exact = linear(x.double(), weight.double())
    # Sums in float32, then one rounding.
    allowed = size * 2**-23 * linear(x.double().abs(), weight.double().abs())
    allowed += 2 * HALF_ULP[dtype] * exact.abs()
    given = plain(weight.to(stored))(x.to(dtype))
    assert given.dtype == dtype and given.shape == (rows, out)
    assert ((given - exact).abs() <= allowed).all()


@pytest.mark.parametrize("stored", DTYPES)
def test_outputs_that_are_not_rounded(stored: torch.dtype) -> None:
    x, weight = drawn(40, 128, 900)
    product = plain(weight.to(stored))
    product.out_dtype = torch.float32
    exact = linear(x.double(), weight.double())
    given = product(x)
    assert given.dtype == torch.float32
    bound = 128 * 2**-23 * linear(x.double().abs(), weight.double().abs())
    assert ((given - exact).abs() <= bound + 2**-23 * exact.abs()).all()


@pytest.mark.parametrize("rows,size,out", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8(dtype: torch.dtype, rows: int, size: int, out: int) -> None:
    x, weight = drawn(rows, size, out)
    codes, scales = quantize_rows(weight)
    exact = linear_int8_reference(x.float(), codes, scales)  # rounded by nobody
    given = Product(codes, scales)(x.to(dtype)).float()
    assert torch.allclose(given, exact, rtol=2 * HALF_ULP[dtype] + 1e-6, atol=1e-6)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("rows,size,out", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4(dtype: torch.dtype, rows: int, size: int, out: int, group: int) -> None:
    """Rows are quantized to int8, as for int8 weights."""
    if size % group:
        return
    x, weight = drawn(rows, size, out)
    codes, scales = quantize_groups(weight, group)
    row_codes, row_scales = quantize_rows(x)
    weights = dequantize_groups(codes, scales.double())
    exact = linear(row_codes.double(), weights) * row_scales[:, None]
    sizes = linear(row_codes.double().abs(), weights.abs()) * row_scales[:, None]
    given = Product(codes, scales)(x.to(dtype))
    # What is subtracted for the codes' middle may be some times as large as the weights.
    assert ((given - exact).abs() <= 2 * HALF_ULP[dtype] * exact.abs() + 1e-5 * sizes).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(value: float) -> None:
    x, weight = drawn(3, 64, 40)
    x[1, 17] = value
    for codes, scales in (quantize_rows(weight), quantize_groups(weight, 64)):
        assert Product(codes, scales)(x).isfinite().all(dim=1).tolist() == [True, False, True]


def each_kind(weight: Tensor) -> list[Product]:
    return [
        plain(weight.float()),
        plain(weight),
        Product(*quantize_rows(weight)),
        Product(*quantize_groups(weight, 64)),
    ]


def test_a_row_does_not_know_the_others() -> None:
    x, weight = drawn(100, 256, 96)
    for product in each_kind(weight):
        whole = product(x)
        for rows in (slice(0, 1), slice(7, 20), slice(40, 100)):
            assert torch.equal(product(x[rows].clone()), whole[rows])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 40])
def test_search(rows: int, kind: str) -> None:
    x, weight = drawn(rows, 128, 900)
    weight = weight * 6  # some rows are sure of their token
    cuts = [weight[:512], weight[512:]]  # the second piece does not fill its panels
    logits = linear(x.double(), weight.double())
    if kind == "int8":
        made = [Product(*quantize_rows(w)) for w in cuts]
        logits = linear_int8_reference(x.float(), *quantize_rows(weight)).double()
    else:
        made = [plain(w.to(getattr(torch, kind))) for w in cuts]
    x = x.to(torch.float32 if kind == "float32" else torch.bfloat16)
    for mask in (None, 0, 700, int(logits[0].argmax())):
        masked = logits.clone()
        if mask is not None:
            masked[:, mask] = -torch.inf
        tokens, probs = Search(made)(x, mask)
        assert torch.equal(tokens, masked.argmax(dim=1))
        assert torch.allclose(probs.double(), masked.softmax(dim=1).amax(dim=1), rtol=1e-4)
        some = torch.arange(rows - 1, -1, -3)
        for part, whole in zip(Search(made)(x, mask, some), (tokens, probs), strict=True):
            assert torch.equal(part, whole[some])


def test_search_takes_the_first_of_equals() -> None:
    x, weight = drawn(3, 64, 320)
    weight[200] = weight[37] = weight[290] = 4 * x[0].sign()
    tokens, _ = Search([plain(weight)])(x[:1], None)
    assert tokens.tolist() == [37]


def test_no_rows() -> None:
    """As where every row of a batch is sampled."""
    x, weight = drawn(3, 64, 320)
    product = plain(weight)
    tokens, probs = Search([product])(x[:0], 5)
    assert tokens.shape == probs.shape == (0,) and product(x[:0]).shape == (0, 320)
