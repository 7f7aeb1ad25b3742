"""Root-mean-square norm (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn


def unit(x: Tensor, eps: float) -> Tensor:
    """The norm without a weight, computed in float32 and returned in x's dtype."""
    return nn.functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, computed in float32 and returned in
    x's dtype.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return self.weight * unit(x, self.eps)
