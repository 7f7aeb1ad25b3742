"""int8 and 4-bit products against their formulas, on every path that this machine can take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dinfer.kernel import int4, int8

SIZES = [
    (1, 16, 32),
    (5, 48, 64),
    (33, 50, 96),
    (17, 7, 64),
    (0, 16, 64),
    (3, 4112, 32),
    (3, 1040, 2048),
]


def draw(rows: int, out: int, size: int, dtype: torch.dtype = torch.float32) -> tuple:
    draws = torch.Generator().manual_seed(rows + out)
    spread = torch.rand(out, 1, generator=draws) * 3
    x = torch.randn(rows, size, generator=draws).to(dtype)
    return x, torch.randn(out, size, generator=draws) * spread


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-6, 1.0, 3e4]))
def test_int8_codes_are_within_half_a_step(seed: int, scale: float) -> None:
    weight = torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(seed)) * scale
    weight[0, 0] = 0.0
    codes, scales = int8.quantize_rows(weight)
    assert codes.shape == weight.shape and codes.abs().max() == 127
    assert not codes[0, 0].any()
    error = (codes.double() * scales[..., None] - weight.double()).abs()
    assert (error <= scales[..., None].double() * 0.5001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_int8_products_are_exact_sums(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The sums are integers, so all forms agree up to the last rounding."""
    x, weight = draw(*size, dtype)
    codes, scales = int8.quantize_rows(weight)
    expected = int8.linear_int8_reference(x, codes, scales)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    # On a CPU without the instructions, or told not to use them, torch's integer sums saturate.
    whole = [int8.linear_int_mm] if int8.has_int8_instructions() else []
    for form in (*whole, int8.linear_int8_in_float):
        torch.testing.assert_close(form(x, codes, scales), expected, **close)
    torch.testing.assert_close(int8.int8_product(codes, scales)(x), expected, **close)


def test_int8_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(9, 24, 64)
    codes, scales = int8.quantize_rows(weight)
    fast = int8.int8_product(codes, scales)(x)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert not int8.has_int8_instructions()
    torch.testing.assert_close(int8.int8_product(codes, scales)(x), fast, rtol=1e-5, atol=1e-6)


def test_int8_sums_do_not_saturate() -> None:
    codes = torch.full((16, 4096), 127, dtype=torch.int8)
    x = torch.full((3, 4096), 127.0)
    assert (int8.linear_int8_in_float(x, codes, torch.ones(16)) == 127 * 127 * 4096).all()
    assert (int8.int8_product(codes, torch.ones(16))(x) == 127 * 127 * 4096).all()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), group=st.sampled_from([32, 64]), shift=st.sampled_from([0, 50]))
def test_int4_codes_are_within_half_a_step(seed: int, group: int, shift: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, 5, 128, generator=draws) + shift
    packed, scales = int4.quantize_groups(weight, group)
    assert packed.shape == (2, 5, 64) and scales.shape == (2, 5, 128 // group, 2)
    found = int4.dequantize_groups(packed, scales.double())
    # Half a step, and what rounding the scale and the zero to bfloat16 moves the ends of the range.
    grouped = weight.unflatten(-1, (-1, group))
    step = (grouped.amax(-1) - grouped.amin(-1)) / 15
    room = 0.5 * step + 2.0**-9 * 8 * step + 2.0**-8 * (shift + 8 * step)
    error = (found - weight).abs().unflatten(-1, (-1, group)).amax(-1)
    assert (error <= room * 1.01).all()


def test_int4_packing_keeps_the_order() -> None:
    codes = torch.tensor([[0, 15, 3, 12]], dtype=torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    assert packed.tolist() == [[0xF0, 0xC3]]
    assert torch.equal(int4.codes_of(packed), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_int4_products(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight = draw(*size, dtype)
    packed, scales = int4.quantize_groups(weight, 32)
    wide: Tensor = int4.dequantize_groups(packed, scales.double())
    expected = x.double() @ wide.t()
    for found in (
        int4.linear_int4_reference(x, packed, scales),
        int4.linear_int4_in_parts(x, packed, scales),
        int4.int4_product(packed, scales)(x),
    ):
        assert found.dtype == dtype
        norm = torch.linalg.norm(expected).clamp(min=1.0)
        limit = 1e-5 if dtype == torch.float32 else 6e-3
        assert torch.linalg.norm(found.double() - expected) <= limit * norm
