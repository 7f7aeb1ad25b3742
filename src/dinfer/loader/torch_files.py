"""Tensors of a folder's pytorch_model.bin. Only weights are read: nothing in it is run."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dinfer.errors import CheckpointError
from dinfer.loader.files import carries_weights
from dinfer.loader.weights import Header, Pieces, row_ranges
from dinfer.text.tokenizer import refuse_pointer


class TorchFiles:
    """The tensors of pickled files, mapped into memory where their form allows it."""

    def __init__(self, folder: Path, unused: tuple[str, ...], files: dict[Path, list[str]]) -> None:
        self.where = folder
        self._tensors: dict[str, Tensor] = {}
        self.headers: dict[str, Header] = {}
        for path, wanted in files.items():
            held = _tensors(path)
            if gone := sorted(set(wanted) - set(held)):
                raise CheckpointError(f"{path.name} in {folder} does not hold {', '.join(gone)}.")
            for name in filter(lambda name: carries_weights(name, unused), wanted or held):
                x = self._tensors[name] = held[name]
                self.headers[name] = Header(tuple(x.shape), x.dtype, x.numel() * x.itemsize, path)

    def pieces(self, name: str) -> Pieces:
        """The tensor, some rows at a time."""
        tensor = self._tensors[name]
        for rows in row_ranges(tuple(tensor.shape)):
            yield rows, tensor[rows] if tensor.ndim else tensor


def _tensors(path: Path) -> dict[str, Tensor]:
    refuse_pointer(path)
    try:
        try:
            held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before PyTorch 1.6 cannot be mapped
            held = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and is not opened, since that could run code; save"
            " the weights as safetensors."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable file of PyTorch weights.") from error
    if not isinstance(held, dict) or not all(isinstance(x, Tensor) for x in held.values()):
        raise CheckpointError(f"{path} does not hold a table of tensors by name.")
    return held
