"""What values an option of a strategy may have, declared beside its type: `Annotated[int, Range(0,
64)]`. The registry checks them when it builds a strategy from a spec string.
"""

import math
import sys
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from dinfer.errors import RequestError

INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `above` and `below` leave out the ends."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (
            (self.above and value == self.low) or (self.below and value == self.high)
        )

    def __str__(self) -> str:
        if not (self.above or self.below) and self.high < INT_MAX:
            return f"between {self.low:g} and {self.high:g}"
        low = f"more than {self.low:g}" if self.above else f"{self.low:g} or more"
        return f"{low} and {'less than' if self.below else 'at most'} {self.high:.10g}"


Probability = Annotated[float, Range(0, 1)]
NonNegative = Annotated[float, Range(0, 1e6)]
Count = Annotated[int, Range(0, INT_MAX)]
"""A whole number that may be 0."""
Positive = Annotated[int, Range(1, INT_MAX)]
Rounds = Annotated[int, Range(0, 1024)]
"""Steps that a decoder may take although nothing is masked any more."""


def check_option(owner: str, name: str, value: Any, hint: Any) -> None:
    """Raises RequestError where a number is outside its range, or, without one, not finite or so
    large or small that arithmetic with it would overflow.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    span = next((x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Range)), None)
    if span is None:
        span = Range(-INT_MAX, INT_MAX) if isinstance(value, int) else Range(-1e30, 1e30)
    if isinstance(value, float) and 0 < abs(value) < sys.float_info.epsilon:
        raise RequestError(f"The {owner} has {name} {value}; this is too close to 0, so give 0.")
    if not math.isfinite(value) or value not in span:
        raise RequestError(f"The {owner} has {name} {value}; it must be {span}.")


def plain_type(hint: Any) -> Any:
    """The type of an option without what is declared beside it."""
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint
