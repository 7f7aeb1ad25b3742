"""Weights in the layout of our own kernels, and products with them (`product.h`).

R rows, D inputs, O outputs, G groups of a row, V vocabulary.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dinfer.kernel.int4 import codes_of
from dinfer.native.build import library
from dinfer.native.pages import prefer

PANEL = 32
"""Outputs whose weights lie together."""
STEP = {torch.float32: 16, torch.bfloat16: 32, torch.int8: 64, torch.uint8: 64}
"""Inputs of a step, by what weights are stored in (uint8: int4 codes)."""
ROWS = (torch.float32, torch.bfloat16)
"""What rows may come in."""
_KINDS = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)
_RAISED, _EXCHANGED = 1, 2
"""Forms of int8, as dense.cpp's `form` tells them."""


class Linear(ctypes.Structure):
    """As in product.h: addresses of weights, scales, lifts, bias; numbers of steps and panels, the
    kind of weights, steps of a group.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "lifts", "bias")),
        *((name, ctypes.c_int64) for name in ("steps", "panels", "kind", "group")),
    )


class Piece(ctypes.Structure):
    """As in head.h: a part of the vocabulary, its first token and how many there are."""

    _fields_ = (("weight", Linear), ("first", ctypes.c_int64), ("columns", ctypes.c_int64))


def packed(weight_OD: Tensor) -> Tensor:
    """[panels, steps, 2 tiles, places, 16 outputs] words of 4 bytes, as int32; outputs are filled
    up with zeros to whole panels.
    """
    places = 8 if weight_OD.dtype == torch.uint8 else 16
    words = _whole_panels(weight_OD).contiguous().view(torch.int32)
    panels = words.view(len(words) // PANEL, 2, 16, -1, places).permute(0, 3, 1, 4, 2)
    out = torch.empty(panels.shape, dtype=torch.int32)
    prefer(out.data_ptr(), out.nbytes)
    return out.copy_(panels)


def _whole_panels(x: Tensor) -> Tensor:
    """Zeros behind the last output."""
    missing = -len(x) % PANEL
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def _exchanged(codes_OD: Tensor) -> Tensor:
    """The second and third of each four inputs change places."""
    fours = codes_OD.reshape(len(codes_OD), -1, 4)
    return fours[..., [0, 2, 1, 3]].flatten(1)


def _interleaved(codes_OD: Tensor) -> Tensor:
    """Packed int4 codes [O, D / 2]: of each 64 inputs, input i in the low half of byte i and input
    32 + i in the high one.
    """
    steps = codes_of(codes_OD).view(len(codes_OD), -1, 2, 32)
    return (steps[:, :, 0] | steps[:, :, 1] << 4).flatten(1)


class Product:
    """`x -> x W^T` for float32 or bfloat16 rows, as the layers of `nn/quantized.py` call it. The
    dtype of the codes tells their kind.
    """

    out_dtype: torch.dtype | None = None
    """float32 for outputs that are not rounded to the dtype of the rows; None = that dtype."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.outputs, kind = len(codes), codes.dtype
        self.inputs = codes.shape[1] * (2 if kind == torch.uint8 else 1)
        self.linear = Linear(kind=_KINDS.index(kind), steps=self.inputs // STEP[kind])
        self.linear.panels = -(-self.outputs // PANEL)
        self._kept: list[Tensor] = []
        if kind == torch.int8:
            self._lay_int8(codes, scales)
        elif kind == torch.uint8:
            self._lay_int4(codes, scales)
        else:
            self.linear.weights = self._keep(packed(codes))

    def _lay_int8(self, codes_OD: Tensor, scales_O: Tensor) -> None:
        form = library().form()
        laid = _exchanged(codes_OD) if form == _EXCHANGED else codes_OD
        self.linear.weights = self._keep(packed(laid))
        self.linear.scales = self._keep(_whole_panels(scales_O.float()))
        if form == _RAISED:
            lifts = 128 * codes_OD.sum(dim=1, dtype=torch.int32)
            self.linear.lifts = self._keep(_whole_panels(lifts))

    def _lay_int4(self, codes_OD: Tensor, scales_OG: Tensor) -> None:
        groups = scales_OG.shape[1]
        self.linear.weights = self._keep(packed(_interleaved(codes_OD)))
        scales = _whole_panels(scales_OG).view(-1, PANEL, groups, 2).permute(0, 2, 3, 1)
        self.linear.scales = self._keep(scales)
        self.linear.group = self.linear.steps // groups

    def _keep(self, x: Tensor) -> int:
        """The address of a tensor that lives as long as this."""
        self._kept.append(x.contiguous())
        return int(self._kept[-1].data_ptr())

    def __call__(self, x_RD: Tensor) -> Tensor:
        """[R, O] in x's dtype, or in `out_dtype`."""
        x = x_RD.contiguous()
        out = x.new_empty(len(x), self.outputs, dtype=self.out_dtype)
        library().product(
            ctypes.addressof(self.linear), x.data_ptr(), len(x), self.inputs, self.outputs,
            is_wide(x), is_wide(out), torch.get_num_threads(), out.data_ptr(),
        )  # fmt: skip
        return out


def is_wide(x: Tensor) -> bool:
    """Whether it is float32; else bfloat16, and nothing else comes to the kernels."""
    assert x.dtype in ROWS, x.dtype
    return x.dtype == torch.float32


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
        tokens, probs = torch.empty(count, dtype=torch.int64), torch.empty(count)
        index = None if rows is None else rows.data_ptr()
        found = tokens.data_ptr(), probs.data_ptr()
        self.run(x.data_ptr(), index, (count, size), mask_id, is_wide(x), found)
        return tokens, probs

    def run(
        self, x: int, index: int | None, shape: tuple[int, int], mask_id: int | None, wide: bool,
        found: tuple[int, int],
    ) -> None:  # fmt: skip
        """The same for rows [R, D] = `shape` that lie at an address; tokens and probabilities go
        to the two addresses `found`. wide: rows are float32, else bfloat16.
        """
        library().likeliest(
            ctypes.addressof(self.pieces), len(self.pieces), x, index, *shape,
            -1 if mask_id is None else mask_id, wide, torch.get_num_threads(), *found,
        )  # fmt: skip


@dataclass(frozen=True)
class PrepackedScheme:
    """A scheme of `nn/quantized.py` whose weights (plain, int8 or int4 codes) are laid out so.
    head: the scheme of the head; None = the same. from_plain: see Scheme.
    """

    scheme: Any
    head: Any = None
    from_plain: bool = False
    copies: ClassVar[bool] = True

    def for_head(self) -> "PrepackedScheme":
        """Laid out so too."""
        return self if self.head is None else PrepackedScheme(self.head, from_plain=True)

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
