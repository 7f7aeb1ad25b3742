"""Rotary position embedding (arXiv 2104.09864), half-split ("rotate-half") form, and the ways to
scale it for contexts longer than those of the pretraining.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]
"""cos and sin of a set of rows, each [T, 1, rotated channels], float32."""


@dataclass(frozen=True)
class RopeScaling:
    """How angles differ from the plain ones; the names of the kinds are transformers'.

    kind: `linear` divides all rates by `factor`; `dynamic` changes nothing up to `original`
    positions, and there are no more; `llama3` divides the rates that turn less than `slow` times in
    `original` positions and keeps those that turn more than `fast` times; `yarn` (arXiv 2309.00071)
    does so by channel. Between the two bounds the rates are mixed. attention: factor of cos and
    sin. truncate: the bounds of `yarn` are whole channels.
    """

    kind: str
    factor: float
    original: int = 0
    fast: float = 0.0
    slow: float = 0.0
    attention: float = 1.0
    truncate: bool = True

    def scaled(self, rates: Tensor, theta: float) -> Tensor:
        """The rates [pairs] of these plain ones, `theta^(-i/pairs)`."""
        if self.kind == "dynamic":
            return rates
        slowed = rates / self.factor
        if self.kind == "linear":
            return slowed
        kept = self._by_turns(rates) if self.kind == "llama3" else self._by_channel(rates, theta)
        return slowed * (1 - kept) + rates * kept

    def _by_turns(self, rates: Tensor) -> Tensor:
        """How much of each plain rate `llama3` keeps, [pairs] from 0 to 1."""
        turns = self.original * rates / (2 * math.pi)
        return ((turns - self.slow) / (self.fast - self.slow)).clamp(0, 1)

    def _by_channel(self, rates: Tensor, theta: float) -> Tensor:
        """How much of each plain rate `yarn` keeps, [pairs] from 0 to 1."""
        pairs = len(rates)
        low, high = (
            pairs * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.fast, self.slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        numbers = torch.arange(pairs, device=rates.device, dtype=torch.float32)
        return 1 - ((numbers - low) / (high - low or 0.001)).clamp(0, 1)


def rotary_table(
    positions_T: Tensor,
    size: int,
    theta: float,
    turned: int | None = None,
    scaling: RopeScaling | None = None,
) -> Rotary:
    """cos and sin for the given positions, angles in float32: `position * theta^(-2i/size)`, scaled
    where asked for, for the first `turned` pairs i (None = all), 0 for the others.
    """
    rates = theta ** (
        -torch.arange(0, size, 2, device=positions_T.device, dtype=torch.float32) / size
    )
    if scaling is not None:
        rates = scaling.scaled(rates, theta)
    if turned is not None:
        rates[turned:] = 0.0
    angles = positions_T.float()[:, None] * rates
    both = torch.cat((angles, angles), dim=-1)[:, None]
    factor = 1.0 if scaling is None else scaling.attention
    return (both.cos(), both.sin()) if factor == 1 else (both.cos() * factor, both.sin() * factor)


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
