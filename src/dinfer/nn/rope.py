"""Rotary position embedding (arXiv 2104.09864), half-split ("rotate-half") form."""

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]
"""cos and sin of a set of rows, each [T, 1, rotated channels], float32."""


def rotary_table(positions_T: Tensor, size: int, theta: float, turned: int | None = None) -> Rotary:
    """cos and sin for the given positions, angles in float32: `position * theta^(-2i/size)` for
    the first `turned` pairs i (None = all), 0 for the others.
    """
    rates = theta ** (
        -torch.arange(0, size, 2, device=positions_T.device, dtype=torch.float32) / size
    )
    if turned is not None:
        rates[turned:] = 0.0
    angles = positions_T.float()[:, None] * rates
    both = torch.cat((angles, angles), dim=-1)[:, None]
    return both.cos(), both.sin()


def rotate(x_THd: Tensor, rotary: Rotary) -> Tensor:
    """Rotates each pair (i, i + n/2) of the first n channels of the heads by its position's angle,
    where the table has n; computed in float32, x's dtype kept.
    """
    cos, sin = rotary
    n = cos.shape[-1]
    x = x_THd[..., :n].float()
    left, right = x.chunk(2, dim=-1)
    turned = (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x_THd.dtype)
    return turned if n == x_THd.shape[-1] else torch.cat((turned, x_THd[..., n:]), dim=-1)
