"""A dense model's body as one call of `native/dense.cpp`."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.attention.sdpa import Segment
from dinfer.kv.pool import KVCachePool
from dinfer.native import build, pages
from dinfer.native.products import Linear, PrepackedScheme, Product, Search
from dinfer.nn.mlp import GatedMLP
from dinfer.nn.norm import RMSNorm
from dinfer.nn.packed import Packed
from dinfer.nn.quantized import QuantizedHead, QuantizedLinear
from dinfer.nn.rope import rotary_table
from dinfer.nn.transformer import Layer, ModelConfig, Transformer
from dinfer.quant.int8 import Int8

Ids = npt.NDArray[np.int64]
_LANES, _WIDEST = 32, 256
"""Heads and rotated channels come in multiples of this; most channels of a head."""
_SMALL = 1 << 30
"""Bytes of weights up to which all memory moves into huge pages, in a second or two. The panels of
larger ones were laid there, and the rest matters less.
"""


def supports(
    kind: type[Transformer], shape: ModelConfig, dtype: torch.dtype, scheme: object
) -> bool:
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
        and shape.head_size <= _WIDEST
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
    "_Model", layers=_At, norm=_At, embedding=_At, count=_N, hidden=_N, heads=_N, kv_heads=_N,
    size=_N, rotary=_N, intermediate=_N, slots=_N, eps=ctypes.c_double,
)  # fmt: skip


def is_prepacked(model: Transformer) -> bool:
    """Whether the model's weights were laid out for the kernels."""
    layer = next(iter(model.layers), None)
    return isinstance(layer, Layer) and isinstance(_scheme(layer.attention.qkv), PrepackedScheme)


def _scheme(layer: object) -> object:
    return layer.scheme if isinstance(layer, QuantizedLinear) else None


class NativeRunner:
    """Runs like the model, of which `is_prepacked` is true, on keys and values in a pool."""

    def __init__(self, model: Transformer, pool: KVCachePool) -> None:
        self.model = model
        self._kept: list[Any] = []
        self._tables = (torch.empty(0), torch.empty(0))
        self._library = build.library()
        layers = [x for x in model.modules() if isinstance(x, QuantizedLinear)]
        if sum(layer.bytes for layer in layers) <= _SMALL:
            pages.collapse()
        if isinstance(model.head, QuantizedHead):
            model.head.search = Search(model.head.products)
        self._lay(pool)

    def __call__(
        self,
        inputs: Sequence[Ids],
        spans: Sequence[Segment],
        length: int,
        x_TD: Tensor | None = None,
    ) -> Tensor:
        """Normed hidden rows [T, D], as Transformer.forward gives them.

        inputs: tokens, positions and slots of the rows, 3 T numbers one after the other. spans: who
        sees what; of none of them a mask. length: positions are below it. x_TD: input rows, where
        they are not the tokens' embeddings.
        """
        cos, sin = self._rotary(length)
        plan = np.concatenate((*inputs, *_table(spans)))
        rows = sum(map(len, inputs)) // 3
        out = torch.empty(rows, self.model.shape.hidden, dtype=torch.bfloat16)
        given = None if x_TD is None else x_TD.data_ptr()
        self._library.body(
            ctypes.addressof(self._model), given, plan.ctypes.data, cos.data_ptr(), sin.data_ptr(),
            out.data_ptr(), rows, len(spans), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _lay(self, pool: KVCachePool) -> None:
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
                pool.keys(number).data_ptr(), pool.values(number).data_ptr(),
            )  # fmt: skip
        self._model = _Model(
            ctypes.addressof(self._layers), self._norm(model.norm),
            model.embedding.weight.data_ptr(), shape.layers, shape.hidden, shape.heads,
            shape.kv_heads, shape.head_size, shape.rotary or shape.head_size, shape.intermediate,
            len(pool.keys(0)), shape.norm_eps,
        )  # fmt: skip

    def _linear(self, layer: torch.nn.Module) -> Linear:
        assert isinstance(layer, QuantizedLinear)
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


def _table(spans: Sequence[Segment]) -> list[Ids]:
    """[spans * 4] as attention.h has them, and the slots of those that are no runs."""
    numbers: list[int] = []
    lists: list[Ids] = []
    at = 0
    for span in spans:
        slots = span.slots
        if isinstance(slots, slice):
            numbers += (span.start, span.stop, slots.start, slots.stop - slots.start)
        else:
            numbers += (span.start, span.stop, -1 - at, len(slots))
            lists.append(slots)
            at += len(slots)
    return [np.array(numbers, np.int64), *lists]
