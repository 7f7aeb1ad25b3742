"""int8 weights with rows quantized on the way in (LLM.int8's row-wise scales, arXiv 2208.07339,
without its outliers).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dinfer.kernel.int8 import Product, int8_product, quantize_rows


@dataclass(frozen=True)
class Int8:
    """One byte a weight and one float32 scale a row; integer products."""

    copies: ClassVar[bool] = False
    from_plain: ClassVar[bool] = False

    def for_head(self) -> "Int8":
        """Stored so too."""
        return self

    def fits(self, size: int) -> bool:
        """Rows of any size."""
        return True

    def empty(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Room for the codes and scales of a weight."""
        return torch.empty(shape, dtype=torch.int8), torch.empty(shape[:-1], dtype=torch.float32)

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight."""
        return quantize_rows(weight)

    def product(self, codes: Tensor, scales: Tensor) -> Product:
        """`x -> x W^T`."""
        return int8_product(codes, scales)
