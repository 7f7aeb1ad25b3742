"""Random numbers that depend on nothing but (seed, position, step, index): counter-based, so batch
mates do not matter.

The mixing function is the finaliser of splitmix64 (Steele et al., OOPSLA 2014) on 64-bit integers
that wrap around.
"""

import torch
from torch import Tensor


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    # Right shift of signed integers keeps the sign; the mask makes it the unsigned shift.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds_R: Tensor, positions_R: Tensor, steps_R: Tensor, count: int) -> Tensor:
    """[R, count] float32, uniform in the open interval (0, 1); all arguments are int64."""
    golden = -0x61C8864680B583EB
    key = _mix(_mix(_mix(seeds_R + golden) ^ positions_R) ^ steps_R)
    index = torch.arange(1, count + 1, device=key.device)
    bits = _shift(_mix(key[:, None] + index * golden), 40)
    return (bits.float() + 0.5) * 2.0**-24
