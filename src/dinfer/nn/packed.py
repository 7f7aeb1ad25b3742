"""Plain weights in the layout of oneDNN's products, as a scheme of `nn/quantized.py`.

A product of a few rows with weights as they come lays them out anew each time, or goes through a
library tuned for another maker's CPU: for the bundled models on an AMD CPU, packed ones take
between a half and nine tenths of the time. How a row is rounded may depend on how many there are,
as with plain ones (with PyTorch 2.13 it hardly ever does).
"""

from collections.abc import Callable
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor

_ROWS = 32
"""A hint to oneDNN of how many rows come at once; it makes no difference that we could measure."""


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights are packed there: on x86 CPUs (where that was measured) whose oneDNN does it
    for this dtype. Without AVX-512 it refuses bfloat16, for example.
    """
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.cpu.get_capabilities().get("avx2", False)
        and _can_pack(dtype)
    )


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Tries the operation once: flags do not tell what a build of oneDNN takes, and
    ONEDNN_MAX_CPU_ISA may lower it.
    """
    weight = torch.zeros(16, 16, dtype=dtype, device="cpu")
    try:
        _product(weight, torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS))
    except RuntimeError:
        return False
    return True


class Packed:
    """All bits of the weights, which take the codes' place; there are no scales."""

    copies: ClassVar[bool] = False
    from_plain: ClassVar[bool] = False

    def for_head(self) -> "Packed":
        """Stored so too."""
        return self

    def fits(self, size: int) -> bool:
        """Rows of any size."""
        return True

    def empty(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Room for a weight."""
        return torch.empty(shape), torch.empty(*shape[:-1], 0)

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The weight itself."""
        return weight, weight.new_empty(*weight.shape[:-1], 0)

    def product(self, codes: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
        """`x -> x W^T`."""
        packed = torch.ops.mkldnn._reorder_linear_weight(codes, _ROWS)
        return partial(_product, packed=packed)


def _product(x_TD: Tensor, packed: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, packed, None, "none", [], "")
    return out
