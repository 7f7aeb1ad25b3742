"""Root-mean-square norm (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn


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
        return self.weight * nn.functional.rms_norm(
            x.float(), self.weight.shape, None, self.eps
        ).to(x.dtype)
