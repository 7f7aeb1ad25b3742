"""Tensors of a folder's safetensors files.

They are read, not mapped: the pages of a mapped file count as memory of the process until it is
closed, and a checkpoint in bfloat16 is larger than the model that it is quantized to.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from dinfer.errors import CheckpointError
from dinfer.loader.files import carries_weights, weight_files
from dinfer.loader.weights import Header, Pieces, row_ranges
from dinfer.text.tokenizer import refuse_pointer

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class _Entry(NamedTuple):
    start: int
    header: Header


class SafetensorsFiles:
    """The tensors of a checkpoint in Hugging Face form, from its index or its single file, without
    those whose names begin as `unused` says. Raises CheckpointError for files that are missing or
    damaged.
    """

    def __init__(
        self,
        folder: Path,
        unused: tuple[str, ...] = (),
        files: dict[Path, list[str]] | None = None,
    ) -> None:
        self.where = folder
        found: dict[str, _Entry] = {}
        for path, wanted in (files or weight_files(folder)).items():
            held = _entries(path)
            if gone := sorted(set(wanted) - set(held)):
                raise CheckpointError(f"{path.name} in {folder} does not hold {', '.join(gone)}.")
            found |= {
                name: entry
                for name, entry in held.items()
                if name in (wanted or held) and carries_weights(name, unused)
            }
        self._entries = found
        self.headers = {name: entry.header for name, entry in found.items()}
        self._buffer = bytearray()

    def pieces(self, name: str) -> Pieces:
        """The tensor, some rows at a time; all pieces lie in the same memory, one after another."""
        start, (shape, dtype, _, path) = self._entries[name]
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):  # the system then reads further ahead
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            file.seek(start)
            for rows in row_ranges(shape):
                part = (len(range(*rows.indices(shape[0]))), *shape[1:]) if shape else shape
                size = torch.Size(part).numel() * dtype.itemsize
                if size > len(self._buffer):
                    self._buffer = bytearray(size)
                view = memoryview(self._buffer)[:size]
                if file.readinto(view) != size:
                    raise CheckpointError(f"{path.name} in {self.where} ends within {name}.")
                yield rows, torch.frombuffer(view, dtype=dtype).view(part)


def _entries(path: Path) -> dict[str, _Entry]:
    """The header of a file, in the order of the data (https://github.com/huggingface/safetensors:
    8 bytes of length, JSON, data). The library checks that it is sound.
    """
    refuse_pointer(path)
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} in {path.parent} is no readable safetensors file: {error}."
        ) from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        held = json.loads(file.read(size))
    held.pop("__metadata__", None)
    found = {}
    for name, entry in sorted(held.items(), key=lambda item: item[1]["data_offsets"]):
        low, high = entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{name} holds {entry['dtype']}, which is not supported.")
        header = Header(tuple(entry["shape"]), _DTYPES[entry["dtype"]], high - low, path)
        found[name] = _Entry(8 + size + low, header)
    return found
