"""Strategies by name: the folder is the registry, and a spec string names one with its options.

A spec is `name` or `name:option=value:...`, for example `vicinity:left=16:right=16`. A strategy is
a frozen dataclass; its fields are its options. Listing names imports nothing. Third parties add
theirs with `register` or with an entry point in the group `dinfer.<kind>`.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import pkgutil
import typing
from pathlib import Path
from typing import Any

from dinfer.errors import UnknownName
from dinfer.options import check_option, plain_type

STRATEGIES = ("decoder", "cache", "iteration")
"""Kinds that a request chooses."""

KINDS = (*STRATEGIES, "quant")
_registered: dict[str, dict[str, type[Any]]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str) -> typing.Callable[[type[Any]], type[Any]]:
    """Decorator: makes a strategy class of a third party known as `name`."""

    def add(cls: type[Any]) -> type[Any]:
        _registered[kind][name] = cls
        build.cache_clear()
        return cls

    return add


def names(kind: str) -> list[str]:
    """All names of a kind (decoder, cache, iteration, or model), sorted; imports none of them."""
    # Families are found by their architectures, in the folder alone.
    plugged = set(_plugged(kind)) if kind in KINDS else set()
    return sorted(_files(kind) | plugged | set(_registered.get(kind, {})))


@functools.cache
def _files(kind: str) -> frozenset[str]:
    """Names of the files in a kind's folder. Kept: each request asks for three strategies."""
    folder = Path(__file__).parent / kind
    return frozenset(module.name for module in pkgutil.iter_modules([str(folder)]))


@functools.cache
def _options(cls: type[Any]) -> dict[str, Any]:
    """A strategy's options with their types."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


@functools.cache
def _plugged(kind: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points of a kind. Kept: finding them reads the metadata of every installed package."""
    points = importlib.metadata.entry_points(group=f"dinfer.{kind}")
    return {point.name: point for point in points}


def near(given: str, allowed: list[str]) -> str:
    """`Did you mean ...?` with the closest of `allowed`, or nothing, and the list."""
    # The comparison takes quadratic time, and no name is that long.
    match = difflib.get_close_matches(given, allowed, n=1) if len(given) <= 200 else []
    guess = f" Did you mean {match[0]!r}?" if match else ""
    return f"{guess} Allowed: {', '.join(allowed) or 'none'}."


def find(kind: str, name: str) -> type[Any]:
    """The strategy class called `name`: the one dataclass that the file `dinfer/<kind>/<name>.py`
    defines.
    """
    if name not in names(kind):
        raise UnknownName(f"Unknown {kind} {name!r}.{near(name, names(kind))}")
    if name in _registered[kind]:
        return _registered[kind][name]
    if name in _plugged(kind):
        plugged: type[Any] = _plugged(kind)[name].load()
        return plugged
    module = importlib.import_module(f"dinfer.{kind}.{name}")
    own = [
        c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__
    ]
    (found,) = [c for c in own if dataclasses.is_dataclass(c)]
    return found


@functools.lru_cache(maxsize=256)
def build(kind: str, spec: str) -> Any:
    """The strategy that a spec string describes. Raises UnknownName for a wrong name, option or
    value. Kept: requests ask for the same few again and again, and a strategy holds no state.
    """
    name, *options = spec.split(":")
    cls = find(kind, name.strip())
    allowed = _options(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for option in options:
        key, sign, text = option.partition("=")
        key = key.strip()
        if not sign:
            raise UnknownName(
                f"In {spec!r}, {option!r} is no option; write option=value,"
                f" for example {_example(cls)}."
            )
        if key not in allowed:
            raise UnknownName(
                f"Unknown option {key!r} of {kind} {name!r}.{near(key, list(allowed))}"
            )
        owner = f"{kind} {name.strip()!r}"
        values[key] = _value(owner, key, text.strip(), plain_type(allowed[key]))
        check_option(owner, key, values[key], allowed[key])
    return cls(**values)


def spec_of(name: str, strategy: Any) -> str:
    """The spec string of a strategy, options at their defaults left out."""
    parts = [name]
    for field in dataclasses.fields(strategy):
        value = getattr(strategy, field.name)
        if value != field.default:
            parts.append(f"{field.name}={str(value).lower() if isinstance(value, bool) else value}")
    return ":".join(parts)


def _example(cls: type[Any]) -> str:
    return (
        ":".join(f"{field.name}={field.default}" for field in dataclasses.fields(cls))
        or "no options at all"
    )


def _value(owner: str, key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind is type(None) and text.lower() == "none":
            return None
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        if kind is str:
            return text
    wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
    raise UnknownName(f"Option {key!r} of {owner} is {text!r}; a value of type {wanted} is needed.")
