"""Products with int8 weights and rows: both are quantized symmetrically, one scale each per row.

T rows, D in, O out. `y = (q_x q_w^T) * scale_x * scale_w`, sums exact in 32-bit integers.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""`x [T, D] -> [T, O]` in x's dtype."""
_ZERO = 128
_OUTPUTS = 256
"""Outputs whose codes become float32 at once."""
_EXACT = 1024
"""Products of two codes whose sum float32 holds exactly: 1024 * 127 * 127 < 2 ** 24."""
_LEAST_ROWS = 32
"""CUDA's integer product takes more than 16 rows, in whole tiles."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in -127..127 (int8, x's shape) and scales (float32, without the last axis)."""
    wide = x.float()
    # A row of zeros keeps a scale that can be divided by.
    scales = wide.abs().amax(dim=-1).clamp(min=1e-30) / 127
    return (wide / scales[..., None]).round().to(torch.int8), scales


def linear_int8_reference(x_TD: Tensor, codes_OD: Tensor, scales_O: Tensor) -> Tensor:
    """The formula of the module, as it stands."""
    rows, scales_T = quantize_rows(x_TD)
    sums = rows.double() @ codes_OD.double().t()
    return (sums * scales_T[:, None] * scales_O).to(x_TD.dtype)


def int8_product(codes_OD: Tensor, scales_O: Tensor) -> Product:
    """The fastest form there is for the weights' device and this machine. It takes the codes and
    scales over; where it needs another layout it keeps a copy, and drops the codes.
    """
    if codes_OD.is_cuda:
        whole = all(size % 8 == 0 for size in codes_OD.shape)
        return partial(linear_int_mm if whole else linear_int8_reference, codes_OD=codes_OD,
                       scales_O=scales_O)  # fmt: skip
    if has_int8_instructions():
        packed = torch.ops.onednn.qlinear_prepack(codes_OD, None)
        return partial(_linear_onednn, packed=packed, scales_O=scales_O)
    return partial(linear_int8_in_float, codes_OD=codes_OD, scales_O=scales_O)


def has_int8_instructions() -> bool:
    """Whether oneDNN multiplies int8 pairs into 32 bits here. Without VNNI or AMX its 16-bit sums
    may saturate, so besides the CPU's flags the largest sums are tried once.
    """
    known = torch.cpu.get_capabilities()
    return any(known.get(x) for x in ("amx_int8", "avx512_vnni", "avx_vnni")) and _is_exact()


@cache
def _is_exact() -> bool:
    codes = torch.full((16, 64), 127, dtype=torch.int8, device="cpu")
    try:
        packed = torch.ops.onednn.qlinear_prepack(codes, None)
        found = _linear_onednn(codes[:1].float(), packed, torch.ones(16, device="cpu"))
    except RuntimeError:
        return False
    return bool((found == 127 * 127 * 64).all())


def linear_int8_in_float(x_TD: Tensor, codes_OD: Tensor, scales_O: Tensor) -> Tensor:
    """For CPUs without int8 instructions, where torch's integer product is up to 15 times slower
    than one in float32: codes become float32, some at a time so that they stay in the cache. Sums
    of `_EXACT` products are exact in float32, and are added up in float64.
    """
    rows, scales_T = quantize_rows(x_TD)
    wide = rows.float()
    sums = torch.zeros(len(rows), len(codes_OD), dtype=torch.float64)
    for first in range(0, len(codes_OD), _OUTPUTS):
        out = slice(first, first + _OUTPUTS)
        for start in range(0, rows.shape[1], _EXACT):
            part = slice(start, start + _EXACT)
            sums[:, out] += wide[:, part] @ codes_OD[out, part].float().t()
    return (sums.float() * scales_T[:, None] * scales_O).to(x_TD.dtype)


def linear_int_mm(x_TD: Tensor, codes_OD: Tensor, scales_O: Tensor) -> Tensor:
    """Through torch's own integer product: CUDA with sizes in multiples of 8, and any CPU."""
    rows, scales_T = quantize_rows(x_TD)
    missing = -len(rows) % _LEAST_ROWS if rows.is_cuda else 0
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    sums = torch._int_mm(padded, codes_OD.t())[: len(rows)]
    return (sums.float() * scales_T[:, None] * scales_O).to(x_TD.dtype)


def _linear_onednn(x_TD: Tensor, packed: Tensor, scales_O: Tensor) -> Tensor:
    rows, scales_T = quantize_rows(x_TD)
    # Unsigned rows, 128 higher: without AMX the instructions take one side unsigned, and signed
    # rows fall to a path a thousand times slower. Flipping the top bit adds the 128.
    raised, one, zero = rows.view(torch.uint8).bitwise_xor_(_ZERO), 1.0, 0
    # The row's scale is left to us: the operation takes one for all rows.
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        raised, one, _ZERO, packed, scales_O, None, None, one, zero, torch.float32, "none", [], ""
    )
    return sums.mul_(scales_T[:, None]).to(x_TD.dtype)
