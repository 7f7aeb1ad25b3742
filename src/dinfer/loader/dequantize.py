"""The weights of a quantized checkpoint as if they were plain ones."""

from collections.abc import Mapping

import torch

from dinfer.loader.stored_formats import (
    Settings,
    StoredWeight,
    is_for_activations,
    stored_weights,
)
from dinfer.loader.weights import Header, Pieces, Tensors, row_ranges, whole


def dequantized(tensors: Tensors, settings: Settings) -> "Dequantized":
    """The tensors of a checkpoint with this `quantization_config`. Raises CheckpointError where it
    is not supported.
    """
    return Dequantized(tensors, stored_weights(settings, tensors.headers))


class Dequantized:
    """Tensors of which some are held by several others (codes, scales, ...), which are then not
    seen. One weight's codes are in memory at a time, and some of its rows as float32.
    """

    def __init__(self, tensors: Tensors, stored: Mapping[str, StoredWeight]) -> None:
        self.where = tensors.where
        self._tensors, self._stored = tensors, stored
        # By the part that lies where the weight would.
        self._names = {weight.parts["codes"]: name for name, weight in stored.items()}
        parts = {part for weight in stored.values() for part in weight.parts.values()}
        self.headers: dict[str, Header] = {}
        for name, header in tensors.headers.items():
            if name in self._names:
                weight = stored[self._names[name]]
                size = sum(tensors.headers[part].bytes for part in weight.parts.values())
                made = Header(weight.shape, torch.float32, size, header.file)
                self.headers[self._names[name]] = made
            elif name not in parts and not (stored and is_for_activations(name)):
                self.headers[name] = header

    def pieces(self, name: str) -> Pieces:
        """The tensor, some rows at a time."""
        if name not in self._stored:
            yield from self._tensors.pieces(name)
            return
        weight = self._stored[name]
        parts = {role: whole(self._tensors, part) for role, part in weight.parts.items()}
        for rows in row_ranges(weight.shape):
            yield rows, weight.rows(parts, rows)
