"""The body of a dense or mixture model as one call of `native/dense.cpp`."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.attention.sdpa import Segment
from dinfer.attention.self_masked import SelfMaskedRows
from dinfer.kv.pool import KVCachePool
from dinfer.native import build, pages
from dinfer.native.products import (
    PANEL,
    ROWS,
    STEP,
    Linear,
    PrepackedScheme,
    Product,
    Search,
    is_wide,
)  # fmt: skip
from dinfer.nn.mlp import GatedMLP
from dinfer.nn.moe import GroupedSigmoid, MixtureMLP, Softmax
from dinfer.nn.norm import RMSNorm
from dinfer.nn.packed import Packed
from dinfer.nn.quantized import QuantizedGroupedLinear, QuantizedHead, QuantizedLinear
from dinfer.nn.transformer import Layer, ModelConfig, Transformer
from dinfer.quant.int4 import Int4
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
    return (
        kind is Transformer
        and dtype in ROWS
        and _fits(shape, dtype, scheme)
        and shape.head_size % _LANES == 0
        and shape.head_size <= _WIDEST
        and shape.rotary % _LANES == 0
        and build.able()
    )


def _fits(shape: ModelConfig, dtype: torch.dtype, scheme: object) -> bool:
    """Whether all products have inputs in whole steps (and groups) and outputs in whole panels."""
    if isinstance(scheme, Packed):
        step = max(PANEL, STEP[dtype])
    elif isinstance(scheme, Int8):
        step = STEP[torch.int8]
    elif isinstance(scheme, Int4):
        step = max(STEP[torch.uint8], scheme.group)
        if scheme.group % STEP[torch.uint8]:
            return False
    else:
        return False
    sizes = [shape.hidden, shape.heads * shape.head_size]
    mixture = shape.mixture
    if mixture is None or mixture.first > 0:
        sizes.append(shape.intermediate)
    if mixture is not None:
        sizes += (mixture.intermediate, mixture.shared)
        if mixture.activation != "silu" or not isinstance(
            mixture.routing, Softmax | GroupedSigmoid
        ):
            return False
    return all(size % step == 0 for size in sizes)


def _struct(name: str, **kinds: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": tuple(kinds.items())})


_At, _N = ctypes.c_void_p, ctypes.c_int64
_Layer = _struct(
    "_Layer", qkv=Linear, out=Linear, gate_up=Linear, down=Linear,
    attention_norm=_At, q_norm=_At, k_norm=_At, mlp_norm=_At, keys=_At, values=_At, mixture=_At,
)  # fmt: skip
_Model = _struct(
    "_Model", layers=_At, norm=_At, embedding=_At, count=_N, hidden=_N, heads=_N, kv_heads=_N,
    size=_N, rotary=_N, intermediate=_N, slots=_N, experts=_N, top=_N, expert=_N,
    eps=ctypes.c_double,
)  # fmt: skip
_Mixture = _struct(
    "_Mixture", router=Linear, gate_up=_At, down=_At, shared_gate_up=Linear, shared_down=Linear,
    bias=_At, experts=_N, top=_N, intermediate=_N, shared=_N, groups=_N, kept=_N, normalised=_N,
    scale=ctypes.c_double,
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
        self._wide = is_wide(model.embedding.weight)
        layers = [x for x in model.modules() if isinstance(x, QuantizedLinear)]
        if sum(layer.bytes for layer in layers) <= _SMALL:
            pages.collapse()
        if isinstance(model.head, QuantizedHead):
            # The search sees the sums themselves, so logits are not rounded either.
            for product in model.head.products:
                _product(product).out_dtype = torch.float32
            model.head.search = Search(model.head.products)
        self._lay(pool)

    def __call__(
        self,
        inputs: Sequence[Ids],
        spans: Sequence[Segment],
        length: int,
        x_TD: Tensor | None = None,
        shades: Sequence[SelfMaskedRows] = (),
    ) -> Tensor:
        """Normed hidden rows [T, D], as Transformer.forward gives them.

        inputs: tokens, positions and slots of the rows, one after the other; shadow rows, which
        come last, have no slots. spans: who sees what. length: positions are below it. x_TD: input
        rows, where they are not the tokens' embeddings. shades: what the shadow rows see.
        """
        cos, sin = self._rotary(length)
        shadows = shades[-1].span.stop if shades else 0
        rows = (sum(map(len, inputs)) + shadows) // 3
        all_spans = [*spans, *(_beside(shade, rows - shadows) for shade in shades)]
        masks = [span.seen for span in all_spans if span.seen is not None]
        flags = np.concatenate([x.ravel() for x in masks]) if masks else None
        plan = np.concatenate((*inputs, *segment_table(all_spans)))
        embedding = self.model.embedding.weight
        out = torch.empty(rows, self.model.shape.hidden, dtype=embedding.dtype)
        self._library.body(
            ctypes.addressof(self._model), None if x_TD is None else x_TD.data_ptr(),
            plan.ctypes.data, None if flags is None else flags.ctypes.data,
            cos.data_ptr(), sin.data_ptr(), out.data_ptr(), rows, rows - shadows, len(all_spans),
            is_wide(out), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def run_plan(self, plan: int, rows: int, segments: int, length: int, out: int) -> None:
        """The same for a `plan` that lies at an address, as `body` of dense.cpp wants it, without
        masks and shadow rows; the hidden rows go to the address `out`.
        """
        cos, sin = self._rotary(length)
        self._library.body(
            ctypes.addressof(self._model), None, plan, None, cos.data_ptr(), sin.data_ptr(), out,
            rows, rows, segments, self._wide, torch.get_num_threads(),
        )  # fmt: skip

    def _lay(self, pool: KVCachePool) -> None:
        """The model in the words of dense.cpp."""
        shape, model, mixture = self.model.shape, self.model, self.model.shape.mixture
        self._layers = (_Layer * shape.layers)()
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            self._layers[number] = self._layer(layer)
            self._layers[number].keys = pool.keys(number).data_ptr()
            self._layers[number].values = pool.values(number).data_ptr()
        self._model = _Model(
            ctypes.addressof(self._layers), self._norm(model.norm),
            model.embedding.weight.data_ptr(), shape.layers, shape.hidden, shape.heads,
            shape.kv_heads, shape.head_size, shape.rotary or shape.head_size, shape.intermediate,
            len(pool.keys(0)), eps=shape.norm_eps,
        )  # fmt: skip
        if mixture is not None:
            self._model.experts, self._model.top = mixture.experts, mixture.routing.top
            self._model.expert = mixture.intermediate
            dense = shape.intermediate if mixture.first else 0
            self._model.intermediate = max(dense, mixture.shared)

    def _layer(self, layer: Layer) -> Any:
        attention, mlp = layer.attention, layer.mlp
        out = _Layer(
            self._linear(attention.qkv), self._linear(attention.out),
            attention_norm=self._norm(layer.attention_norm), q_norm=self._norm(attention.q_norm),
            k_norm=self._norm(attention.k_norm), mlp_norm=self._norm(layer.mlp_norm),
        )  # fmt: skip
        if isinstance(mlp, MixtureMLP):
            self._kept.append(self._mixture(mlp))
            out.mixture = ctypes.addressof(self._kept[-1])
        else:
            out.gate_up, out.down = self._linear(mlp.gate_up), self._linear(mlp.down)
        return out

    def _mixture(self, mlp: MixtureMLP) -> Any:
        routing, shape = mlp.router.routing, self.model.shape.mixture
        assert shape is not None and isinstance(routing, Softmax | GroupedSigmoid)
        router = Product(mlp.router.weight.detach(), mlp.router.weight)
        self._kept.append(router)
        out = _Mixture(
            router.linear, self._experts(mlp.gate_up), self._experts(mlp.down),
            experts=shape.experts, top=routing.top, intermediate=shape.intermediate,
        )  # fmt: skip
        if mlp.router.bias is not None:
            out.bias = self._floats(mlp.router.bias)
        if isinstance(routing, GroupedSigmoid):
            out.groups, out.kept, out.scale = routing.groups, routing.kept, routing.scale
        else:
            out.normalised = routing.normalised
        if isinstance(mlp.shared, GatedMLP):
            out.shared = shape.shared
            out.shared_gate_up = self._linear(mlp.shared.gate_up)
            out.shared_down = self._linear(mlp.shared.down)
        return out

    def _experts(self, layer: torch.nn.Module) -> int:
        """The address of the experts' weights."""
        assert isinstance(layer, QuantizedGroupedLinear)
        linears = (Linear * layer.count)(*(_product(x).linear for x in layer.products))
        self._kept.append(linears)
        return ctypes.addressof(linears)

    def _linear(self, layer: torch.nn.Module) -> Linear:
        assert isinstance(layer, QuantizedLinear)
        linear = Linear.from_buffer_copy(_product(layer.products[0]).linear)
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
            tables = shape.rotary_rows(torch.arange(2 * length))
            cos, sin = (x[:, 0, : channels // 2].contiguous() for x in tables)
            self._tables = cos, sin
        return self._tables


def _product(given: object) -> Product:
    assert isinstance(given, Product)
    return given


def _beside(shade: SelfMaskedRows, first: int) -> Segment:
    """The span of shadow rows, the first of them row `first`: each sees all but its column."""
    span, (rows, slots) = shade.span, shade.span.size
    seen = np.ones((rows, slots), np.bool_) if span.seen is None else span.seen.copy()
    seen[np.arange(rows), shade.columns.numpy()] = False
    return Segment(first + span.start, first + span.stop, span.slots, seen)


def segment_table(spans: Sequence[Segment]) -> list[Ids]:
    """[spans * 5] as attention.h has them, and the slots of those that are no runs."""
    numbers: list[int] = []
    lists: list[Ids] = []
    listed = flags = 0
    for span in spans:
        slots, (rows, count) = span.slots, span.size
        mask = -1 if span.seen is None else flags
        flags += 0 if span.seen is None else rows * count
        if isinstance(slots, slice):
            numbers += (span.start, span.stop, slots.start, count, mask)
        else:
            numbers += (span.start, span.stop, -1 - listed, count, mask)
            lists.append(slots)
            listed += count
    return [np.array(numbers, np.int64), *lists]
