"""Rotary position embedding (arXiv 2104.09864), half-split ("rotate-half") form."""

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]
"""cos and sin of a set of rows, each [T, 1, head_dim], float32."""


def rotary_table(positions_T: Tensor, size: int, theta: float) -> Rotary:
    """cos and sin for the given positions, angles in float32: `position * theta^(-2i/size)`."""
    rates = theta ** (
        -torch.arange(0, size, 2, device=positions_T.device, dtype=torch.float32) / size
    )
    angles = positions_T.float()[:, None] * rates
    both = torch.cat((angles, angles), dim=-1)[:, None]
    return both.cos(), both.sin()


def rotate(x_THd: Tensor, rotary: Rotary) -> Tensor:
    """Rotates each pair (i, i + d/2) of the heads by its position's angle; computed in float32,
    x's dtype kept.
    """
    cos, sin = rotary
    x = x_THd.float()
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x_THd.dtype)
