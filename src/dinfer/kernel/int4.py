"""Products with 4-bit weights: groups of neighbours on a row share a scale and a zero.

T rows, D in, O out, G groups of a row. `w = (code - 8) * scale + zero`, codes 0..15, two a byte,
the earlier one in the low half; scales [O, G, 2] (bfloat16) hold scale and zero.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""`x [T, D] -> [T, O]` in x's dtype."""
_OUTPUTS = 256
"""Outputs whose weights are written out at once."""
_AT_ONCE, _TILE = 1 << 20, 64
"""Weights, and rows, that are laid out anew together."""


def quantize_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes [..., D/2] (uint8) and scales [..., D/group, 2]: the range of each group is cut into 15
    equal steps.
    """
    grouped = x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)
    low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    # The codes are made for the scales as they are stored, rounded to bfloat16.
    scale = ((high - low).clamp(min=1e-20) / 15).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    steps = (grouped - zero.float()[..., None]) / scale.float()[..., None] + 8
    codes = steps.round().clamp(0, 15).to(torch.uint8).flatten(-2)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed, torch.stack((scale, zero), dim=-1)


def codes_of(packed: Tensor) -> Tensor:
    """Codes [..., D] (uint8) of packed ones."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantize_groups(packed: Tensor, scales: Tensor) -> Tensor:
    """Weights [..., D] in the dtype of the scales."""
    codes = codes_of(packed)
    grouped = codes.reshape(*scales.shape[:-1], codes.shape[-1] // scales.shape[-2])
    return ((grouped.to(scales.dtype) - 8) * scales[..., :1] + scales[..., 1:]).flatten(-2)


def linear_int4_reference(x_TD: Tensor, codes_OD: Tensor, scales_OG: Tensor) -> Tensor:
    """The product with the weights written out."""
    weight = dequantize_groups(codes_OD, scales_OG.float())
    return (x_TD.float() @ weight.t()).to(x_TD.dtype)


def int4_product(codes_OD: Tensor, scales_OG: Tensor) -> Product:
    """The fastest form there is for the weights' device. It takes the codes and scales over: where
    it needs another layout, they are laid out anew in the same memory.
    """
    size, groups = codes_OD.shape[1] * 2, scales_OG.shape[1]
    if codes_OD.device.type == "cpu" and not _has_int4_kernel():
        return partial(linear_int4_in_parts, codes_OD=codes_OD, scales_OG=scales_OG)
    if codes_OD.is_cuda or len(codes_OD) % 16 or size // groups not in (32, 64, 128, 256):
        return partial(linear_int4_reference, codes_OD=codes_OD, scales_OG=scales_OG)
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    # It takes 4 bytes a code: some rows at a time, in whole tiles of its layout.
    for part in torch.split(codes_OD, max(1, _AT_ONCE // (size * _TILE)) * _TILE):
        part.copy_(pack(codes_of(part).int(), 1))
    laid = scales_OG.view(groups, len(codes_OD), 2)
    laid.copy_(scales_OG.transpose(0, 1).clone(memory_format=torch.contiguous_format))
    return partial(_linear_packed, packed=codes_OD, scales_GO=laid, group=size // groups)


def _has_int4_kernel() -> bool:
    """Whether torch's packed 4-bit product is vectorised for every dtype: from AVX-512 on. With
    AVX2 alone, float32 rows take a scalar loop.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def linear_int4_in_parts(x_TD: Tensor, codes_OD: Tensor, scales_OG: Tensor) -> Tensor:
    """The product with the weights written out, some outputs at a time so that they stay in the
    cache.
    """
    x = x_TD.float()
    parts = [
        x @ dequantize_groups(codes, scales.float()).t()
        for codes, scales in zip(
            torch.split(codes_OD, _OUTPUTS), torch.split(scales_OG, _OUTPUTS), strict=True
        )
    ]
    return torch.cat(parts, dim=1).to(x_TD.dtype)


def _linear_packed(x_TD: Tensor, packed: Tensor, scales_GO: Tensor, group: int) -> Tensor:
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x_TD.contiguous(), packed, group, scales_GO.to(x_TD.dtype)
    )
    return out
