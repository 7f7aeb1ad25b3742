"""Sums and products without a story: training material alone, never evaluated.

A word problem holds few sums between many words; these give the digits of results as often as
words come elsewhere.
"""

import random
from dataclasses import dataclass

LINES = 14
"""Sums in a drill."""


@dataclass(frozen=True)
class ArithmeticExample:
    """A list of sums: `key` decides the split like that of the other tasks."""

    key: str
    prompt: str
    answer: str


def _sum(rng: random.Random) -> str:
    sign = rng.choice("+++---*/")
    if sign == "+":
        a, b = rng.randint(2, 99), rng.randint(1, 60)
        return f"{a}+{b}={a + b}"
    if sign == "-":
        a = rng.randint(3, 99)
        b = rng.randint(1, a - 1)
        return f"{a}-{b}={a - b}"
    b = rng.randint(2, 9)
    a = rng.randint(2, max(9, 99 // b))
    return f"{a}*{b}={a * b}" if sign == "*" else f"{a * b}/{b}={a}"


def _larger(rng: random.Random) -> str:
    """A sum as the free-wording problems and tables have them: up to three digits."""
    sign = rng.choice("++---*/")
    high = rng.choice([60, 240, 999])
    if sign == "+":
        a, b = rng.randint(2, min(high, 240)), rng.randint(2, 60)
        return f"{a}+{b}={a + b}"
    if sign == "-":
        a = rng.randint(3, high)
        b = rng.randint(1, a - 1)
        return f"{a}-{b}={a - b}"
    b = rng.randint(2, 25)
    a = rng.randint(2, max(2, 240 // b))
    return f"{a}*{b}={a * b}" if sign == "*" else f"{a * b}/{b}={a}"


def draw_larger_arithmetic(rng: random.Random) -> ArithmeticExample:
    """Draws a drill of larger numbers; the same state of `rng` gives the same one."""
    lines = [_larger(rng) for _ in range(LINES)]
    return ArithmeticExample(f"sums {lines}", "Sums.", "\n".join(lines))


def draw_arithmetic(rng: random.Random) -> ArithmeticExample:
    """Draws one drill; the same state of `rng` gives the same one."""
    lines = [_sum(rng) for _ in range(LINES)]
    return ArithmeticExample(f"drill {lines}", "Sums.", "\n".join(lines))
