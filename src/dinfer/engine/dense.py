"""A dense model's body as one call of `native/dense.cpp`."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dinfer.engine import pages
from dinfer.engine.stored import Stored
from dinfer.kernel.attention import Span
from dinfer.native import build
from dinfer.native.products import Laid, Linear, Product, Search
from dinfer.nn.mlp import GatedMLP
from dinfer.nn.norm import RMSNorm
from dinfer.nn.packed import Packed
from dinfer.nn.quantised import CodedHead, CodedLinear
from dinfer.nn.rope import rotary_table
from dinfer.nn.transformer import Layer, Shape, Transformer
from dinfer.quant.int8 import Int8

_LANES = 32
"""Heads and rotated channels come in multiples of this."""


def serves(kind: type[Transformer], shape: Shape, dtype: torch.dtype, scheme: object) -> bool:
    """Whether the kernels can run such a model, its weights stored so, on this machine."""
    line = 64 if isinstance(scheme, Int8) else 32
    inner = (shape.hidden, shape.intermediate, shape.heads * shape.head_size)
    return (
        isinstance(scheme, Packed | Int8)
        and kind is Transformer
        and shape.mixture is None
        and dtype == torch.bfloat16
        and all(size % line == 0 for size in inner)
        and shape.head_size % _LANES == 0
        and shape.rotary % _LANES == 0
        and build.able()
    )


def _struct(name: str, **kinds: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": tuple(kinds.items())})


_At, _N = ctypes.c_void_p, ctypes.c_int64
_Layer = _struct(
    "_Layer", qkv=Linear, out=Linear, gate_up=Linear, down=Linear,
    attention_norm=_At, q_norm=_At, k_norm=_At, mlp_norm=_At, keys=_At, values=_At,
)  # fmt: skip
_Model = _struct(
    "_Model", layers=_At, norm=_At, count=_N, hidden=_N, heads=_N, kv_heads=_N, size=_N,
    rotary=_N, intermediate=_N, eps=ctypes.c_double,
)  # fmt: skip


def laid(model: Transformer) -> bool:
    """Whether the model's weights were laid out for the kernels."""
    layer = model.layers[0]
    return isinstance(layer, Layer) and isinstance(_scheme(layer.attention.qkv), Laid)


def _scheme(layer: object) -> object:
    return layer.scheme if isinstance(layer, CodedLinear) else None


class Dense:
    """Runs like the model, of which `laid` is true, where rows of a span see the same slots and
    there are no shadow rows; else the model itself runs.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._kept: list[Any] = []
        self._layers: Any = None
        self._tables = (torch.empty(0), torch.empty(0))
        self._library = build.library()
        pages.collapse()
        if isinstance(model.head, CodedHead):
            model.head.search = Search(model.head.products)

    def __call__(self, x_TD: Tensor, positions_T: Tensor, attend: Stored, *more: Tensor) -> Tensor:
        """Normed hidden rows [T, D], as Transformer.forward gives them."""
        spans = attend.spans[None]
        if attend.shades or any(span.seen is not None for span in spans):
            out: Tensor = self.model(x_TD, positions_T, attend, *more)
            return out
        if self._layers is None:
            self._lay(attend)
        cos, sin = self._rotary(attend.length)
        table, listed = _table(spans)
        x, out = x_TD.contiguous(), torch.empty_like(x_TD)
        self._library.body(
            ctypes.addressof(self._model), x.data_ptr(), positions_T.data_ptr(),
            attend.slots_T.data_ptr(), cos.data_ptr(), sin.data_ptr(), table.ctypes.data,
            listed.ctypes.data, out.data_ptr(), len(x), len(table), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _lay(self, attend: Stored) -> None:
        """The model in the words of dense.cpp."""
        shape, model = self.model.shape, self.model
        self._layers = (_Layer * shape.layers)()
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, Layer) and isinstance(layer.mlp, GatedMLP)
            attention, mlp = layer.attention, layer.mlp
            self._layers[number] = _Layer(
                self._linear(attention.qkv), self._linear(attention.out),
                self._linear(mlp.gate_up), self._linear(mlp.down),
                self._norm(layer.attention_norm), self._norm(attention.q_norm),
                self._norm(attention.k_norm), self._norm(layer.mlp_norm),
                attend.pool.keys(number).data_ptr(), attend.pool.values(number).data_ptr(),
            )  # fmt: skip
        self._model = _Model(
            ctypes.addressof(self._layers), self._norm(model.norm), shape.layers, shape.hidden,
            shape.heads, shape.kv_heads, shape.head_size, shape.rotary or shape.head_size,
            shape.intermediate, shape.norm_eps,
        )  # fmt: skip

    def _linear(self, layer: torch.nn.Module) -> Linear:
        assert isinstance(layer, CodedLinear)
        product = layer.products[0]
        assert isinstance(product, Product)
        linear = Linear.from_buffer_copy(product.linear)
        if layer.bias is not None:
            linear.bias = self._floats(layer.bias)
        return linear

    def _norm(self, norm: torch.nn.Module) -> int | None:
        return self._floats(norm.weight) if isinstance(norm, RMSNorm) else None

    def _floats(self, x: Tensor) -> int:
        self._kept.append(x.float().contiguous())
        return int(self._kept[-1].data_ptr())

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, rotated channels / 2] for at least so many positions."""
        if len(self._tables[0]) < length:
            shape = self.model.shape
            channels = shape.rotary or shape.head_size
            tables = rotary_table(torch.arange(2 * length), channels, shape.rope_theta)
            cos, sin = (x[:, 0, : channels // 2].contiguous() for x in tables)
            self._tables = cos, sin
        return self._tables


def _table(spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
    """[spans, 4] as attention.h has them, and the slots of those that are no runs."""
    rows, lists, at = [], [], 0
    for span in spans:
        slots = span.slots
        if isinstance(slots, slice):
            rows.append((span.start, span.stop, slots.start, slots.stop - slots.start))
        else:
            rows.append((span.start, span.stop, -1 - at, len(slots)))
            lists.append(slots)
            at += len(slots)
    listed = np.concatenate(lists) if lists else np.empty(0, np.int64)
    return np.array(rows, np.int64), listed.astype(np.int64, copy=False)
