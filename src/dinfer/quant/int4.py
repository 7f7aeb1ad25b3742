"""4-bit weights in groups with a scale and a zero each, rounded to nearest (the baseline of AWQ,
arXiv 2306.00978, without its search); rows stay as they are.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.kernel.int4 import Product, int4_product, quantize_groups

GROUPS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Int4:
    """Half a byte a weight, and a bfloat16 scale and zero for every `group` of them.

    Layers whose rows are no multiple of the group stay unquantized.
    """

    group: int = 64
    copies: ClassVar[bool] = False
    from_plain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            allowed = ", ".join(map(str, GROUPS))
            raise RequestError(f"int4 group is {self.group}; it must be one of {allowed}.")

    def for_head(self) -> None:
        """It stays as it is."""

    def fits(self, size: int) -> bool:
        """Rows of whole groups."""
        return size % self.group == 0

    def empty(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Room for the codes and scales of a weight."""
        *lead, size = shape
        return (
            torch.empty(*lead, size // 2, dtype=torch.uint8),
            torch.empty(*lead, size // self.group, 2, dtype=torch.bfloat16),
        )

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight."""
        return quantize_groups(weight, self.group)

    def product(self, codes: Tensor, scales: Tensor) -> Product:
        """`x -> x W^T`."""
        return int4_product(codes, scales)
