"""Linear layers whose weights are stored in another form: mostly codes and scales. How they are
made is a scheme's matter.

The rows of a weight are quantized one by one, so the pieces of a fused weight can be written as
they come from the file.
"""

from collections.abc import Callable, Iterable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from dinfer.kernel.greedy import PIECE, GreedySearch
from dinfer.kernel.grouped_gemm import active
from dinfer.nn.linear import GroupedLinear, Linear
from dinfer.nn.transformer import Transformer

AT_ONCE = 1 << 20
"""Weights that are quantized at once; their temporary copies in float32 stay in the cache."""


class Scheme(Protocol):
    """A way to store weights: in fewer bits (`quant/`), or laid out for a device (`packed.py`)."""

    copies: ClassVar[bool]
    """Whether a head that is the embedding has a copy that is stored as `for_head` says."""

    @property
    def from_plain(self) -> bool:
        """Whether checkpoints whose other weights are stored as codes hold these plain."""
        ...

    def for_head(self) -> "Scheme | None":
        """How the head is stored; None = as it is."""
        ...

    def fits(self, size: int) -> bool:
        """Whether weights with rows of this size can be stored so."""
        ...

    def empty(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Room for the codes and scales of a weight of this shape."""
        ...

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight."""
        ...

    def product(self, codes: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
        """`x -> x W^T` for one weight [O, D]."""
        ...


class QuantizedWeight:
    """A weight, or a part of one, that is stored as codes; `copy_` quantizes into it."""

    def __init__(
        self, scheme: Scheme, codes: Tensor, scales: Tensor, shape: tuple[int, ...]
    ) -> None:
        self.scheme, self.codes, self.scales = scheme, codes, scales
        self.shape = torch.Size(shape)

    def __getitem__(self, place: int | slice) -> "QuantizedWeight":
        codes = self.codes[place]
        shape = (*codes.shape[:-1], self.shape[-1])
        return QuantizedWeight(self.scheme, codes, self.scales[place], shape)

    def copy_(self, weight: Tensor) -> None:
        """Quantizes a weight of this shape, on the device where the codes lie; some rows at a time,
        so that what is needed in between stays small.
        """
        if weight.dim() == 3:  # one matrix for each expert
            for place, part in enumerate(weight):
                self[place].copy_(part)
            return
        rows = max(1, AT_ONCE // weight.shape[1])
        for start in range(0, len(weight), rows):
            part = slice(start, start + rows)
            codes, scales = self.scheme.quantize(weight[part].to(self.codes.device))
            self.codes[part] = codes
            self.scales[part] = scales


class _Quantized(nn.Module):
    """Codes and scales of a weight until `finalize` makes products of them."""

    codes: Tensor | None
    scales: Tensor | None

    def __init__(self, scheme: Scheme, *shape: int) -> None:
        super().__init__()
        self.scheme, self.shape = scheme, shape
        codes, scales = scheme.empty(*shape)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bytes = codes.nbytes + scales.nbytes
        self.products: list[Callable[[Tensor], Tensor]] = []

    @property
    def weight(self) -> QuantizedWeight:
        """Where the weight is written."""
        assert self.codes is not None and self.scales is not None, "already finalized"
        return QuantizedWeight(self.scheme, self.codes, self.scales, self.shape)

    def finalize(self) -> None:
        """Lays the weights out for use, and drops the codes where the layout is another one."""
        codes, scales = self.codes, self.scales
        assert codes is not None and scales is not None, "already finalized"
        self.codes, self.scales = None, None
        self.products = [self.scheme.product(*each) for each in self._parts(codes, scales)]

    def _parts(self, codes: Tensor, scales: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """What has a product of its own: all of it."""
        return [(codes, scales)]


class QuantizedLinear(_Quantized):
    """As `Linear`."""

    def __init__(self, scheme: Scheme, size: int, out: int, bias: bool) -> None:
        super().__init__(scheme, out, size)
        self.bias = nn.Parameter(torch.empty(out)) if bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        # The size is said again for the compiler, which does not know that of packed weights.
        out = self.products[0](x_TD).view(-1, self.shape[0])
        # The bias first: torch's compiler takes `product + bias` for one that it packed itself, and
        # asserts (PyTorch 2.13, is_linear_add_bias).
        return out if self.bias is None else self.bias + out


class QuantizedHead(_Quantized):
    """As a `Linear` without bias, with a product for every PIECE of the vocabulary. search: see
    `greedy_tokens`; None = it has none of its own.
    """

    search: GreedySearch | None = None

    def __init__(self, scheme: Scheme, size: int, out: int) -> None:
        super().__init__(scheme, out, size)
        self.out_features = out

    def _parts(self, codes: Tensor, scales: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(torch.split(codes, PIECE), torch.split(scales, PIECE), strict=True)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.columns(x_TD, 0, self.out_features)

    def columns(self, x_TD: Tensor, start: int, stop: int) -> Tensor:
        """A run of the outputs [T, stop - start], in whole pieces."""
        assert start % PIECE == 0 and (stop % PIECE == 0 or stop == self.out_features)
        parts = [product(x_TD) for product in self.products[start // PIECE : -(-stop // PIECE)]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class QuantizedGroupedLinear(_Quantized):
    """As `GroupedLinear`."""

    def __init__(self, scheme: Scheme, count: int, size: int, out: int) -> None:
        super().__init__(scheme, count, out, size)
        self.count = count

    def _parts(self, codes: Tensor, scales: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(codes, scales, strict=True)

    def forward(self, x_SD: Tensor, counts_E: Tensor) -> Tensor:
        parts = [self.products[expert](x_SD[rows]) for expert, rows in active(counts_E)]
        return torch.cat(parts) if parts else x_SD.new_empty(0, self.shape[1])


def prepare(model: Transformer, scheme: Scheme) -> None:
    """Puts coded layers in the place of the linear ones, as far as the scheme fits their size.

    To be called before weights are loaded. The embedding stays, and so do routers and norms, which
    are no linear layers.
    """
    for owner in list(model.layers.modules()):
        for name, child in owner.named_children():
            if isinstance(child, Linear) and scheme.fits(child.in_features):
                coded: nn.Module = QuantizedLinear(
                    scheme, child.in_features, child.out_features, child.bias is not None
                )
            elif isinstance(child, GroupedLinear) and scheme.fits(child.weight.shape[2]):
                count, out, size = child.weight.shape
                coded = QuantizedGroupedLinear(scheme, count, size, out)
            else:
                continue
            setattr(owner, name, coded)
    shape, head = model.shape, scheme.for_head()
    if head is not None and (not shape.tied or scheme.copies) and head.fits(shape.hidden):
        model.set_submodule("head", QuantizedHead(head, shape.hidden, shape.vocab))


def finalize(model: Transformer) -> None:
    """Makes every coded layer ready for use, one after the other."""
    if model.shape.tied and isinstance(model.head, QuantizedHead):
        model.head.weight.copy_(model.embedding.weight)
    for layer in model.modules():
        if isinstance(layer, _Quantized):
            layer.finalize()
