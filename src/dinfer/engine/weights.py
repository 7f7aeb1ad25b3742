"""Tensors of a checkpoint: where they lie, and into their places one at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dinfer.errors import CheckpointError
from dinfer.nn.quantised import Codes
from dinfer.nn.weights import Slot

Place = Tensor | Codes
_FLOATS = ("F64", "F32", "F16", "BF16")
_CODES = {torch.int8: "I8", torch.uint8: "U8"}
_TORCH = {"I8": "int8", "U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} in {path.parent} cannot be read as JSON: {error}."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name} in {path.parent} holds no JSON object.")
    return found


def shards(folder: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it, from the index or the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise CheckpointError(
                f"{index.name} in {folder} holds no weight_map of tensor names to files."
            )
        return {name: folder / file for name, file in table.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(
            f"{folder} holds no model.safetensors and no model.safetensors.index.json."
        )
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} in {path.parent} is no readable safetensors file: {error}."
        ) from error


def places(model: nn.Module, slots: Mapping[str, Slot], coded: bool = False) -> dict[str, Place]:
    """Official tensor name -> the part of the model that it fills.

    coded: the folder holds weights as codes; each is then two tensors, NAME and NAME_scale.
    """
    found: dict[str, Place] = {}
    for name, slot in slots.items():
        place = _place(model, slot)
        if coded and isinstance(place, Codes):
            found |= {name: place.codes, f"{name}_scale": place.scales}
        else:
            found[name] = place
    return found


def _place(model: nn.Module, slot: Slot) -> Place:
    owner, _, attribute = slot.parameter.rpartition(".")
    parameter: Place = getattr(model.get_submodule(owner), attribute)
    return slot.of(parameter) if isinstance(parameter, Codes) else slot.of(parameter.data)


def load_weights(targets: Mapping[str, Place], folder: Path, unused: tuple[str, ...] = ()) -> None:
    """Streams every tensor into its place, one at a time, once all are known to fit."""
    for path, names in checked(targets, folder, unused).items():
        for name, tensor in tensors(path, names):
            targets[name].copy_(tensor)


def tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file, one at a time."""
    with _open(path) as file:
        for name in names:
            yield name, file.get_tensor(name)


def checked(
    targets: Mapping[str, Place], folder: Path, unused: tuple[str, ...] = ()
) -> dict[Path, list[str]]:
    """Names of the tensors in each file of a checkpoint, without those that begin as `unused` says.
    Raises CheckpointError that names what is missing, unexpected, of a wrong shape or of a wrong
    kind; reads headers alone.
    """
    where = {name: path for name, path in shards(folder).items() if not name.startswith(unused)}
    missing, unexpected = sorted(set(targets) - set(where)), sorted(set(where) - set(targets))
    if missing or unexpected:
        parts = [f"missing: {', '.join(missing)}"] * bool(missing)
        parts += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
        raise CheckpointError(
            f"The tensors in {folder} are not those of this family; {'; '.join(parts)}."
        )
    by_file: dict[Path, list[str]] = {path: [] for path in sorted(set(where.values()))}
    for name, path in where.items():
        by_file[path].append(name)
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                _check(file, name, path, targets[name])
    return by_file


def _check(file: Any, name: str, path: Path, target: Place) -> None:
    """The header's entry against the place."""
    try:
        entry = file.get_slice(name)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path.name} in {path.parent} does not hold {name}: {error}."
        ) from error
    if list(target.shape) != entry.get_shape():
        raise CheckpointError(
            f"{name} has the shape {entry.get_shape()}; config.json asks for {list(target.shape)}."
        )
    kind = entry.get_dtype()
    wanted = _CODES.get(target.dtype) if isinstance(target, Tensor) else None
    if kind not in ([wanted] if wanted else _FLOATS):
        allowed = _TORCH[wanted] if wanted else "floating-point"
        raise CheckpointError(
            f"{name} holds {_TORCH.get(kind, kind)}; only {allowed} weights are supported."
        )
