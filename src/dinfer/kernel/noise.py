"""Random numbers that depend on nothing but (seed, position, step, index): counter-based, so batch
mates do not matter.

The mixing function is the finaliser of splitmix64 (Steele et al., OOPSLA 2014) on 64-bit integers
that wrap around.
"""

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    # Right shift of signed integers keeps the sign; the mask makes it the unsigned shift.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds_R: Tensor, positions_R: Tensor, steps_R: Tensor, count: int) -> Tensor:
    """[R, count] float32, uniform in the open interval (0, 1); all arguments are int64."""
    key = _key(seeds_R, positions_R, steps_R)
    index = torch.arange(1, count + 1, device=key.device)
    # 23 bits and a half are exact in float32; with 24 the largest would be rounded to 1.
    bits = _shift(_mix(key[:, None] + index * _GOLDEN), 41)
    return (bits.float() + 0.5) * 2.0**-23


def random_tokens(seeds_R: Tensor, positions_R: Tensor, steps_R: Tensor, vocab: int) -> Tensor:
    """[R] int64, any of `vocab` tokens with the same probability; a stream apart from that of
    `uniform`.
    """
    return _shift(_key(~seeds_R, positions_R, steps_R), 1) % vocab


def _key(seeds_R: Tensor, positions_R: Tensor, steps_R: Tensor) -> Tensor:
    return _mix(_mix(_mix(seeds_R + _GOLDEN) ^ positions_R) ^ steps_R)
