"""Reading keys of a config.json: a missing or unsupported value is refused with the key's name."""

import math
from typing import Any

from dinfer.errors import CheckpointError


def number(config: dict[str, Any], key: str, default: float | None = None) -> float:
    """The value of `key` as a float; `default` where the key is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"config.json has no {key!r}, which this family needs.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"config.json gives {key!r} as {value!r}; a number is needed.")
    if math.isnan(value):
        raise CheckpointError(f"config.json gives {key!r} as NaN; a number is needed.")
    return float(value)


def whole(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The value of `key` as a positive whole number; `default` where the key is absent or null."""
    value = number(config, key, default)
    if not math.isfinite(value) or value != int(value) or value < 1:
        raise CheckpointError(
            f"config.json gives {key!r} as {value:g}; a positive whole number is needed."
        )
    return int(value)


def refuse(config: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises CheckpointError for a key that is present with a value that is not supported."""
    for key, value in expected.items():
        if key in config and config[key] != value and config[key] is not None:
            raise CheckpointError(
                f"config.json has {key!r}: {config[key]!r}; only {value!r} is supported."
            )


_ELSEWHERE: dict[str, Any] = {
    "alibi": False,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "attn_temperature_tuning": False,
    "clip_qkv": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "no_rope_layers": None,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1,
    "use_sliding_window": False,
}
"""Settings of stacks like ours that change numbers and that no family of ours has, with the values
that change nothing.
"""


def refuse_elsewhere(config: dict[str, Any]) -> None:
    """Raises CheckpointError for a setting of a stack that is like ours and not ours."""
    refuse(config, _ELSEWHERE)
    kinds = config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    ):
        raise CheckpointError(
            f"config.json gives 'layer_types' as {kinds!r}; only 'full_attention' is supported."
        )


def ids(config: dict[str, Any], key: str, default: int) -> frozenset[int]:
    """Token ids under `key`, which may be one id, a list, or null; `default` if absent."""
    value = config.get(key, default)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(one) is not int for one in found):
        raise CheckpointError(f"config.json gives {key!r} as {value!r}; token ids are needed.")
    return frozenset(found)
