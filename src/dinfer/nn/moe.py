"""Mixture-of-experts layers (arXiv 1701.06538): each row runs through a few of many small MLPs.

T rows, D hidden, E experts, K experts of a row, S = T * K rows sorted by expert.
"""

import itertools
import weakref
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dinfer.nn.linear import GroupedLinear
from dinfer.nn.mlp import ACTIVATIONS, GatedMLP


class Routing(Protocol):
    """Chooses experts and their weights from the router's logits; `top` of them for each row."""

    @property
    def top(self) -> int:
        """Experts of a row."""
        ...

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights [T, K] float32 and expert numbers [T, K]."""
        ...


@dataclass(frozen=True)
class Softmax:
    """The `top` largest of a softmax over all experts; `normalised` makes them sum to 1."""

    top: int
    normalised: bool

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, chosen = logits_TE.softmax(dim=1).topk(self.top, dim=1)
        return weights / weights.sum(dim=1, keepdim=True) if self.normalised else weights, chosen


@dataclass(frozen=True)
class GroupedSigmoid:
    """DeepSeek-V3's rule (arXiv 2412.19437, section 2.1.2): a bias takes part in the choice alone.

    Experts lie in `groups` of neighbours. A group counts as much as its two best experts; the
    `kept` best groups stay, and the `top` best experts among them are taken. Their weights are the
    sigmoids without bias, scaled to sum to `scale`.
    """

    top: int
    groups: int
    kept: int
    scale: float

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = logits_TE.sigmoid()
        ranked = scores if bias_E is None else scores + bias_E
        grouped = ranked.view(len(ranked), self.groups, ranked.shape[1] // self.groups)
        group = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(dim=2)
        best = group.topk(self.kept, dim=1).indices
        out = torch.ones_like(group, dtype=torch.bool).scatter(1, best, False)
        ranked = grouped.masked_fill(out[:, :, None], -torch.inf).flatten(1)
        chosen = ranked.topk(self.top, dim=1).indices
        weights = scores.gather(1, chosen)
        return weights / (weights.sum(dim=1, keepdim=True) + 1e-20) * self.scale, chosen


@dataclass(frozen=True)
class Mixture:
    """Sizes of the mixture layers of a stack.

    intermediate: of one expert. first: layers before this one are dense. shared: intermediate size
    of the expert that every row runs through besides; 0 = none. biased: the router has a bias.
    activation: of the experts, by its name in config files.
    """

    experts: int
    intermediate: int
    routing: Routing
    first: int = 0
    shared: int = 0
    biased: bool = False
    activation: str = "silu"


class Router(nn.Module):
    """The linear map from rows to experts. Its weights stay in float32 and so does its product:
    near ties decide which expert runs.
    """

    def __init__(self, size: int, mixture: Mixture) -> None:
        super().__init__()
        self.routing = mixture.routing
        self.weight = nn.Parameter(torch.empty(mixture.experts, size, dtype=torch.float32))
        bias = torch.empty(mixture.experts, dtype=torch.float32) if mixture.biased else None
        self.bias = nn.Parameter(bias) if bias is not None else None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.routing(nn.functional.linear(x_TD.float(), self.weight), self.bias)


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, "Experts"] = weakref.WeakValueDictionary()
"""By the number that stands for a layer in a graph, which takes no modules."""


torch.library.define(
    "dinfer::mix", "(Tensor x, Tensor weights, Tensor chosen, int layer) -> Tensor"
)


@torch.library.impl("dinfer::mix", "default")
def _mix(x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, number: int) -> Tensor:
    return _layers[number].mix_now(x_TD, weights_TK, chosen_TK)


@torch.library.register_fake("dinfer::mix")  # type: ignore[untyped-decorator]
def _(x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, number: int) -> Tensor:
    return torch.empty_like(x_TD)


class Experts(nn.Module):
    """`sum over a row's experts of weight * expert(x)`.

    Rows are sorted by expert, so that each active expert is one product over its rows.
    """

    def __init__(self, size: int, mixture: Mixture) -> None:
        super().__init__()
        self._number = next(_numbers)
        _layers[self._number] = self
        self.activation = ACTIVATIONS[mixture.activation]
        self.gate_up = GroupedLinear(mixture.experts, size, 2 * mixture.intermediate)
        self.down = GroupedLinear(mixture.experts, mixture.intermediate, size)

    def mix(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """Rows [T, D] through the experts that a router chose for them."""
        if torch.compiler.is_compiling():
            # Which experts have rows is known at each step alone: one opaque operation.
            out: Tensor = torch.ops.dinfer.mix(x_TD, weights_TK, chosen_TK, self._number)
            return out
        return self.mix_now(x_TD, weights_TK, chosen_TK)

    def mix_now(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """As `mix`, outside a graph."""
        order_S = chosen_TK.flatten().argsort(stable=True)
        counts_E = chosen_TK.flatten().bincount(minlength=self.gate_up.count)
        x_SD = x_TD[order_S // chosen_TK.shape[1]]
        gate, up = self.gate_up(x_SD, counts_E).chunk(2, dim=-1)
        y_SD = self.down(self.activation(gate) * up, counts_E)
        # Back to the rows' own order before the sum: it is then the same in every batch.
        mixed_SD = torch.empty_like(y_SD).index_copy_(0, order_S, y_SD)
        mixed_TKD = mixed_SD.view(*chosen_TK.shape, x_TD.shape[1])
        return torch.einsum("tk,tkd->td", weights_TK, mixed_TKD.float()).to(x_TD.dtype)


class MixtureMLP(Experts):
    """Experts with their router, and the shared expert where there is one."""

    def __init__(self, size: int, mixture: Mixture) -> None:
        super().__init__(size, mixture)
        self.router = Router(size, mixture)
        self.shared = GatedMLP(size, mixture.shared) if mixture.shared else None

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD = self.mix(x_TD, *self.router(x_TD))
        return out_TD if self.shared is None else out_TD + self.shared(x_TD)
