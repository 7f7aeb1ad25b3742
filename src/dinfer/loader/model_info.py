"""Facts of a checkpoint: what its family reads, what its files add, what the caller overrides."""

import dataclasses
import typing
from types import ModuleType
from typing import Any

from dinfer.errors import RequestError
from dinfer.loader.checkpoint import Checkpoint
from dinfer.registry import near
from dinfer.step import ModelInfo

_WANTED = {
    "mask_id": "a token id, a whole number, or null where there is no mask token",
    "eos_ids": "a list of token ids",
    "block_length": "a whole number of 1 or more, or null for full attention",
    "context": "a whole number of 1 or more",
    "iteration": "a spec string",
    "cache": "a spec string",
    "decoder": "a spec string",
    "chat_only": "true or false",
    "shift": "0 or 1",
    "causal": "true or false",
}


def facts_of(
    family: ModuleType,
    checkpoint: Checkpoint,
    overrides: dict[str, Any],
    ends: frozenset[int] = frozenset(),
) -> ModelInfo:
    """Facts from config.json, generation_config.json, dinfer.json (ours, optional), then
    `overrides`. ends: ids that end an answer by the tokenizer and the chat template.
    """
    facts: ModelInfo = family.facts(checkpoint.json("config.json"))
    generation = checkpoint.json("generation_config.json")
    eos = generation.get("eos_token_id")
    more = eos if isinstance(eos, list) else [] if eos is None else [eos]
    facts = dataclasses.replace(facts, eos_ids=facts.eos_ids.union(more, ends))
    facts = family.tuned(facts, generation) if hasattr(family, "tuned") else facts
    eos_ids = _fact("eos_ids", facts.eos_ids - {None})  # null is common where there is none
    facts = dataclasses.replace(facts, mask_id=_fact("mask_id", facts.mask_id), eos_ids=eos_ids)
    allowed = [field.name for field in dataclasses.fields(ModelInfo)]
    for source in (checkpoint.json("dinfer.json"), overrides):
        for key, value in source.items():
            if key not in allowed:
                raise RequestError(f"Unknown fact {key!r}.{near(key, allowed)}")
            facts = dataclasses.replace(facts, **{key: _fact(key, value)})
    if "block_length" in overrides and "iteration" not in overrides and facts.block_length:
        base = "" if facts.causal else ":aligned=true"
        facts = dataclasses.replace(facts, iteration=f"blockwise:length={facts.block_length}{base}")
    return facts


def _fact(key: str, value: Any) -> Any:
    """The value of a fact in its own type. Raises RequestError for another."""
    hint = typing.get_type_hints(ModelInfo)[key]
    if hint == frozenset[int]:
        fits = isinstance(value, list | tuple | set | frozenset)
        fits = fits and all(type(t) is int and t >= 0 for t in value)
        value = frozenset(value) if fits else value
    else:
        fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if key in ("block_length", "context") and isinstance(value, int):
        fits = fits and value >= 1
    if key == "shift":
        fits = fits and value in (0, 1)
    if not fits:
        raise RequestError(f"The fact {key!r} is {value!r}; it must be {_WANTED[key]}.")
    return value
