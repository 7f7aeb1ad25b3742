"""Rotary settings of a config.json, in all spellings that transformers has written: `rope_theta`
and `rope_scaling` (to version 4), `rope_parameters` (from version 5 on).
"""

import math
from dataclasses import dataclass
from typing import Any

from dinfer.config import number, whole
from dinfer.errors import CheckpointError
from dinfer.nn.rope import RopeScaling

_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN),
}
"""Kind of scaling -> the keys that it reads. Others are refused: they would change numbers."""
_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


@dataclass(frozen=True)
class RopeSettings:
    """theta: base of the rates. partial: share of a head's channels that is rotated; None = the
    file does not say. scaling: None = none.
    """

    theta: float
    partial: float | None
    scaling: RopeScaling | None


def rope_of(config: dict[str, Any], context: int) -> RopeSettings:
    """The settings of a model that was trained on, or extended to, `context` positions.

    Raises CheckpointError, with the key's name, for what is missing, contradictory or unsupported.
    """
    name = next((key for key in ("rope_scaling", "rope_parameters") if config.get(key)), None)
    given = config[name] if name else {}
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json gives {name!r} as {given!r}; an object is needed.")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _KEYS:
        raise CheckpointError(
            f"config.json has {kind!r} as the rope_type of {name!r}; only {', '.join(_KEYS)} are"
            " supported."
        )
    for key, value in given.items():
        if value is not None and key not in (*_SHARED, *_KEYS[kind]):
            raise CheckpointError(
                f"config.json has {key!r}: {value!r} in {name!r}, which is not supported for the"
                f" rope_type {kind!r}."
            )
    both = {
        key: _one_of(key, config, given, name) for key in ("rope_theta", "partial_rotary_factor")
    }
    theta = number(both, "rope_theta")
    partial = both["partial_rotary_factor"] and number(both, "partial_rotary_factor")
    return RopeSettings(theta, partial, _scaling(kind, config, given, context))


def _one_of(key: str, config: dict[str, Any], given: dict[str, Any], name: str | None) -> Any:
    """A value that may stand in the config or in its object `name`, but not two of them."""
    outer, inner = config.get(key), given.get(key)
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(
            f"config.json gives {key!r} as {outer!r} and, in {name!r}, as {inner!r}; they must"
            " agree."
        )
    return outer if inner is None else inner


def _scaling(
    kind: str, config: dict[str, Any], given: dict[str, Any], context: int
) -> RopeScaling | None:
    if kind == "default":
        return None
    # A value beside the object wins over one in it, as in transformers.
    key = "original_max_position_embeddings"
    original = whole(config, key, whole(given, key, context))
    factor = number(given, "factor", context / original if kind == "yarn" else None)
    if not 0 < factor < math.inf:
        raise CheckpointError(
            f"config.json gives 'factor' as {factor:g}; a number above 0 is needed."
        )
    if kind == "linear":
        return RopeScaling(kind, factor)
    if kind == "dynamic":
        return RopeScaling(kind, factor, context)
    if kind == "llama3":
        slow, fast = number(given, "low_freq_factor"), number(given, "high_freq_factor")
        return RopeScaling(kind, factor, original, _above(fast, slow), slow)
    slow, fast = number(given, "beta_slow", 1), number(given, "beta_fast", 32)
    truncate = given.get("truncate") is not False
    attention = number(given, "attention_factor", _attention(given, factor))
    return RopeScaling(kind, factor, original, _above(fast, slow), slow, attention, truncate)


def _above(fast: float, slow: float) -> float:
    if not 0 < slow < fast:
        raise CheckpointError(
            f"config.json scales the rotary embedding between {slow:g} and {fast:g} turns; the"
            " first must be above 0 and below the second."
        )
    return fast


def _attention(given: dict[str, Any], factor: float) -> float:
    """What `yarn` multiplies cos and sin by, unless the file says it."""
    if given.get("mscale") and given.get("mscale_all_dim"):
        one, all_ = number(given, "mscale"), number(given, "mscale_all_dim")
        return _mscale(factor, one) / _mscale(factor, all_)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    """The temperature of arXiv 2309.00071, section 3.4, as transformers computes it."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
