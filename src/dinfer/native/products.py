"""Weights in the layout of our own kernels, and products with them (`product.h`).

R rows, D inputs, O outputs, V vocabulary.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dinfer.native.build import library
from dinfer.native.pages import prefer

PANEL = 32
"""Outputs whose weights lie together."""
LINE = 64
"""Bytes of a row's weights that lie together."""
_RAISED = 128


class Linear(ctypes.Structure):
    """As in product.h: addresses of weights, scales, lifts, bias; numbers of lines, panels."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "lifts", "bias")),
        *((name, ctypes.c_int64) for name in ("steps", "panels")),
    )


class Piece(ctypes.Structure):
    """As in head.h: a part of the vocabulary, its first token and how many there are."""

    _fields_ = (("weight", Linear), ("first", ctypes.c_int64), ("columns", ctypes.c_int64))


def packed(weight_OD: Tensor) -> Tensor:
    """[panels, lines, 2 tiles, 16 places of a line, 16 outputs, 4 bytes] as int32, outputs filled
    up with zeros to whole panels.
    """
    missing = -len(weight_OD) % PANEL
    whole = torch.nn.functional.pad(weight_OD, (0, 0, 0, missing)) if missing else weight_OD
    words = whole.contiguous().view(torch.int32)
    panels = words.view(len(whole) // PANEL, 2, 16, -1, 16).permute(0, 3, 1, 4, 2)
    out = torch.empty(panels.shape, dtype=torch.int32)
    prefer(out.data_ptr(), out.nbytes)
    return out.copy_(panels)


class Product:
    """`x -> x W^T` for bfloat16 rows, as the layers of `nn/quantized.py` call it."""

    def __init__(self, codes_OD: Tensor, scales_O: Tensor) -> None:
        self.outputs, self.inputs = codes_OD.shape
        self.kept = [packed(codes_OD)]
        lines, panels = self.inputs * codes_OD.itemsize // LINE, len(self.kept[0])
        self.linear = Linear(self.kept[0].data_ptr(), None, None, None, lines, panels)
        if codes_OD.dtype == torch.int8:
            missing = (0, panels * PANEL - self.outputs)
            self.kept.append(torch.nn.functional.pad(scales_O.float(), missing).contiguous())
            self.linear.scales = self.kept[1].data_ptr()
            if library().raised():
                lifts = _RAISED * codes_OD.sum(dim=1, dtype=torch.int32)
                self.kept.append(torch.nn.functional.pad(lifts, missing).contiguous())
                self.linear.lifts = self.kept[2].data_ptr()

    def __call__(self, x_RD: Tensor) -> Tensor:
        """[R, O], rounded to bfloat16."""
        x = x_RD.contiguous()
        out = x.new_empty(len(x), self.outputs)
        library().product(
            ctypes.addressof(self.linear), x.data_ptr(), len(x), self.inputs, self.outputs,
            torch.get_num_threads(), out.data_ptr(),
        )  # fmt: skip
        return out


class Search:
    """The likeliest tokens under a head that lies in pieces (`head.h`)."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.kept, self.pieces, first = products, (Piece * len(products))(), 0
        for place, product in enumerate(products):
            self.pieces[place] = Piece(product.linear, first, product.outputs)
            first += product.outputs

    def __call__(
        self, x_TD: Tensor, mask_id: int | None, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [R] int64 and their probabilities [R] float32, of which `mask_id` has none, in
        some rows (None: all).
        """
        x = x_TD.contiguous()
        count, size = len(x) if rows is None else len(rows), x.shape[1]
        tokens, chances = torch.empty(count, dtype=torch.int64), torch.empty(count)
        library().likeliest(
            ctypes.addressof(self.pieces), len(self.pieces), x.data_ptr(),
            None if rows is None else rows.data_ptr(), count, size,
            -1 if mask_id is None else mask_id, torch.get_num_threads(),
            tokens.data_ptr(), chances.data_ptr(),
        )  # fmt: skip
        return tokens, chances


@dataclass(frozen=True)
class PrepackedScheme:
    """A scheme of `nn/quantized.py` whose weights (bfloat16 or int8 codes) are laid out so."""

    scheme: Any
    head: ClassVar[bool] = True
    copies: ClassVar[bool] = True

    def fits(self, size: int) -> bool:
        """As the scheme."""
        return bool(self.scheme.fits(size))

    def empty(self, *shape: int) -> tuple[Tensor, Tensor]:
        """As the scheme."""
        room: tuple[Tensor, Tensor] = self.scheme.empty(*shape)
        return room

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """As the scheme."""
        found: tuple[Tensor, Tensor] = self.scheme.quantize(weight)
        return found

    def product(self, codes: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
        """`x -> x W^T`."""
        return Product(codes, scales)
