"""Tensors of a checkpoint, checked and put into their places some rows at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dinfer.errors import CheckpointError
from dinfer.nn.quantized import QuantizedWeight
from dinfer.nn.weight_map import WeightSlot

WeightTarget = Tensor | QuantizedWeight
Pieces = Iterator[tuple[slice, Tensor]]
"""Rows of a tensor and where they belong. A piece may be overwritten when the next one is asked
for.
"""
AT_ONCE = 1 << 20
"""Elements of a piece. Temporary copies in float32 have this size, whatever that of the tensor."""
_MOST_NAMES = 20  # in an error


class Header(NamedTuple):
    """What a file says of a tensor; dtype: what its pieces have; bytes: its size in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    file: Path


class Tensors(Protocol):
    """The tensors of a checkpoint by name."""

    @property
    def where(self) -> Path:
        """The folder or the file."""
        ...

    @property
    def headers(self) -> Mapping[str, Header]:
        """What is there, in the order in which it lies on the disk."""
        ...

    def pieces(self, name: str) -> Pieces:
        """The tensor, some rows at a time."""
        ...


def by_file(tensors: Tensors) -> dict[Path, list[str]]:
    """The names of the tensors in each file."""
    found: dict[Path, list[str]] = {}
    for name, header in tensors.headers.items():
        found.setdefault(header.file, []).append(name)
    return found


def whole(tensors: Tensors, name: str) -> Tensor:
    """A tensor, as its pieces say it."""
    header = tensors.headers[name]
    found = torch.empty(header.shape, dtype=header.dtype)
    fill(found, tensors.pieces(name))
    return found


def row_ranges(shape: tuple[int, ...], whole: int = 1) -> Iterator[slice]:
    """The rows of a tensor in pieces of about AT_ONCE elements, in multiples of `whole` rows; one
    piece for a vector.
    """
    if len(shape) < 2:
        yield slice(None)
        return
    step = max(1, AT_ONCE // (whole * torch.Size(shape[1:]).numel())) * whole
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def places(
    model: nn.Module, slots: Mapping[str, WeightSlot], coded: bool = False
) -> dict[str, WeightTarget]:
    """Official tensor name -> the part of the model that it fills.

    coded: the folder holds weights as codes; each is then two tensors, NAME and NAME_scale.
    """
    found: dict[str, WeightTarget] = {}
    for name, slot in slots.items():
        place = _place(model, slot)
        if coded and isinstance(place, QuantizedWeight) and not place.scheme.from_plain:
            found |= {name: place.codes, f"{name}_scale": place.scales}
        else:
            found[name] = place
    return found


def _place(model: nn.Module, slot: WeightSlot) -> WeightTarget:
    owner, _, attribute = slot.parameter.rpartition(".")
    parameter: WeightTarget = getattr(model.get_submodule(owner), attribute)
    return slot.of(parameter) if isinstance(parameter, QuantizedWeight) else slot.of(parameter.data)


def load_weights(targets: Mapping[str, WeightTarget], tensors: Tensors) -> None:
    """Streams every tensor into its place, once all are known to fit."""
    check(targets, tensors)
    for name in tensors.headers:
        fill(targets[name], tensors.pieces(name))


def fill(place: WeightTarget, pieces: Pieces) -> None:
    """Writes the pieces of a tensor into its place."""
    for rows, piece in pieces:
        (place[rows] if piece.ndim else place).copy_(piece)


def check(targets: Mapping[str, WeightTarget], tensors: Tensors) -> None:
    """Raises CheckpointError that names what is missing, unexpected, of a wrong shape or of a wrong
    kind; nothing but headers is read.
    """
    held = tensors.headers
    missing, unexpected = sorted(set(targets) - set(held)), sorted(set(held) - set(targets))
    if missing or unexpected:
        parts = [f"{len(missing)} of {len(targets)} missing: {_listed(missing)}"] * bool(missing)
        parts += [f"{len(unexpected)} unexpected: {_listed(unexpected)}"] * bool(unexpected)
        raise CheckpointError(
            f"The tensors in {tensors.where} are not those of this family; {'; '.join(parts)}."
        )
    for name, header in held.items():
        _check(name, header, targets[name])


def same(tensors: Tensors, one: str, other: str) -> bool:
    """Whether two tensors of a checkpoint are equal."""
    if tensors.headers[one].shape != tensors.headers[other].shape:
        return False
    # Pieces may share their memory, so one of each pair is kept.
    first = (piece.clone() for _, piece in tensors.pieces(one))
    second = (piece for _, piece in tensors.pieces(other))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _listed(names: list[str]) -> str:
    """All names, or the first of very many."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _check(name: str, header: Header, target: WeightTarget) -> None:
    if tuple(target.shape) != header.shape:
        raise CheckpointError(
            f"{name} has the shape {list(header.shape)}; the checkpoint's config asks for"
            f" {list(target.shape)}."
        )
    stored = target.dtype if isinstance(target, Tensor) else torch.float32
    fits = header.dtype.is_floating_point if stored.is_floating_point else header.dtype == stored
    if not fits:
        allowed = "floating-point" if stored.is_floating_point else _said(stored)
        raise CheckpointError(
            f"{name} holds {_said(header.dtype)}; only {allowed} weights are supported."
        )


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
