"""Gemma 4's stack as DiffusionGemma uses it: sliding and full layers, a dense MLP beside experts,
self-conditioning (arXiv 2208.04202) of the rows that are open.

T rows, R open rows, D hidden, H query heads, K key/value heads, d head size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dinfer.nn.attention import Attend
from dinfer.nn.linear import Linear
from dinfer.nn.mlp import GatedMLP
from dinfer.nn.moe import Experts, Mixture
from dinfer.nn.norm import RMSNorm, unit
from dinfer.nn.rope import Rotary, rotary_table, rotate
from dinfer.nn.transformer import ModelConfig, Transformer

ACTIVATION = "gelu_pytorch_tanh"
NORMS = ("attention", "attention_out", "mlp", "mlp_out", "experts", "experts_out", "out")
"""Norms of a layer: before each part and, `_out`, behind it; the last behind both MLPs."""


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """Sizes; those of Shape are the sliding layers'.

    full: numbers of the layers with full attention, which have sizes and rotary rates of their own
    (full_turned: pairs of channels that are rotated) and no v. window:
    positions that a row of the other layers sees, its own among them. softcap: bound of the logits.
    """

    full: tuple[int, ...] = ()
    full_kv_heads: int = 0
    full_head_size: int = 0
    full_theta: float = 0.0
    full_turned: int = 0
    window: int = 0
    softcap: float = 0.0

    def kv_at(self, layer: int) -> tuple[int, int]:
        """Key/value heads of a layer, and their size."""
        if layer in self.full:
            return self.full_kv_heads, self.full_head_size
        return self.kv_heads, self.head_size

    def window_at(self, layer: int) -> int | None:
        """How many positions a row of a layer sees."""
        return None if layer in self.full else self.window

    def table(self, full: bool, positions_T: Tensor) -> Rotary:
        """cos and sin of rows, in the layers with full attention or the others."""
        if full:
            size, theta = self.full_head_size, self.full_theta
            return rotary_table(positions_T, size, theta, self.full_turned)
        return rotary_table(positions_T, self.head_size, self.rope_theta)


class Attention(nn.Module):
    """q, k and v with a norm each (v's has no weight); scores are not scaled. Where a layer has no
    v, it is k before its norm.
    """

    def __init__(self, shape: GemmaConfig, number: int) -> None:
        super().__init__()
        self.heads, self.eps = shape.heads, shape.norm_eps
        self.kv_heads, self.head_size = shape.kv_at(number)
        self.kv = 1 if number in shape.full else 2
        rows = (self.heads + self.kv * self.kv_heads) * self.head_size
        self.qkv = Linear(shape.hidden, rows)
        self.out = Linear(self.heads * self.head_size, shape.hidden)
        self.q_norm = RMSNorm(self.head_size, self.eps)
        self.k_norm = RMSNorm(self.head_size, self.eps)

    def forward(self, x_TD: Tensor, rotary: Rotary, layer: int, attend: Attend) -> Tensor:
        rows = self.qkv(x_TD).view(len(x_TD), -1, self.head_size)
        q, *kv = rows.split((self.heads, *[self.kv_heads] * self.kv), dim=1)
        # `attend` divides the scores by sqrt(d).
        q = rotate(self.q_norm(q), rotary) * self.head_size**0.5
        mixed = attend(layer, q, rotate(self.k_norm(kv[0]), rotary), unit(kv[-1], self.eps))
        out: Tensor = self.out(mixed.reshape(len(x_TD), -1))
        return out


class Router(nn.Module):
    """Chooses experts from `norm(x) * scale / sqrt(D)`, in float32; each expert's weight is scaled
    once more.
    """

    def __init__(self, shape: GemmaConfig, mixture: Mixture) -> None:
        super().__init__()
        self.routing, self.eps = mixture.routing, shape.norm_eps
        experts, size = mixture.experts, shape.hidden
        self.weight = nn.Parameter(torch.empty(experts, size, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.expert_scale = nn.Parameter(torch.empty(experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, K] float32 and expert numbers [T, K]."""
        x = unit(x_TD.float(), self.eps) * self.scale * x_TD.shape[1] ** -0.5
        weights, chosen = self.routing(nn.functional.linear(x, self.weight), None)
        return weights * self.expert_scale[chosen], chosen


class Layer(nn.Module):
    """Attention, then a dense MLP and experts side by side, with norms before and behind each; the
    whole is scaled by a number that is another one for open rows than for text.
    """

    def __init__(self, shape: GemmaConfig, number: int) -> None:
        super().__init__()
        assert shape.mixture is not None
        self.attention = Attention(shape, number)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate, ACTIVATION)
        self.router = Router(shape, shape.mixture)
        self.experts = Experts(shape.hidden, shape.mixture)
        self.norms = nn.ModuleDict({x: RMSNorm(shape.hidden, shape.norm_eps) for x in NORMS})
        self.scalar = nn.Parameter(torch.empty(1))
        self.text_scalar = nn.Parameter(torch.empty(1))

    def forward(
        self, x_TD: Tensor, rotary: Rotary, layer: int, attend: Attend, open_T: Tensor
    ) -> Tensor:
        norms = self.norms
        mixed = self.attention(norms["attention"](x_TD), rotary, layer, attend)
        x_TD = x_TD + norms["attention_out"](mixed)
        dense = norms["mlp_out"](self.mlp(norms["mlp"](x_TD)))
        sparse = self.experts.mix(norms["experts"](x_TD), *self.router(x_TD))
        x_TD = x_TD + norms["out"](dense + norms["experts_out"](sparse))
        return x_TD * torch.where(open_T[:, None], self.scalar, self.text_scalar)


class Head(Linear):
    """Logits in float32, kept within `cap`: `cap * tanh(x / cap)`."""

    def __init__(self, shape: GemmaConfig) -> None:
        super().__init__(shape.hidden, shape.vocab)
        self.cap = shape.softcap

    def forward(self, x: Tensor) -> Tensor:
        """Logits [..., V]."""
        return self._capped(super().forward(x))

    def columns(self, x_TD: Tensor, start: int, stop: int) -> Tensor:
        """Logits of a run of the vocabulary [T, stop - start]."""
        return self._capped(super().columns(x_TD, start, stop))

    def _capped(self, logits: Tensor) -> Tensor:
        return self.cap * (logits.float() / self.cap).tanh()


class SelfConditioning(nn.Module):
    """`norm(x + mlp(norm(soft)))`, the second norm without a weight."""

    def __init__(self, shape: GemmaConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate, ACTIVATION)

    def forward(self, x_RD: Tensor, soft_RD: Tensor) -> Tensor:
        return unit(x_RD + self.mlp(self.norm(soft_RD)), self.norm.eps)


class Gemma(Transformer):
    """The stack. The encoder of the released code is the same stack over text."""

    shape: GemmaConfig
    conditioned = True

    def __init__(self, shape: GemmaConfig) -> None:
        super().__init__(shape)
        self.head = Head(shape)
        self.head.weight = self.embedding.weight
        self.conditioning = SelfConditioning(shape)

    def layer(self, shape: GemmaConfig, number: int) -> nn.Module:
        """A layer of the stack."""
        return Layer(shape, number)

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Scaled embeddings [T, D], the inputs of text."""
        return self._scaled(self.embedding(tokens_T))

    def condition(self, x_RD: Tensor, soft_RD: Tensor) -> Tensor:
        """Inputs of open rows; the mean embeddings come as the table has them, not scaled."""
        out: Tensor = self.conditioning(x_RD, self._scaled(soft_RD))
        return out

    def _scaled(self, x: Tensor) -> Tensor:
        # The factor is rounded to the weights' dtype, as in training.
        return x * torch.tensor(self.shape.hidden**0.5).to(x)

    def forward(
        self, x_TD: Tensor, positions_T: Tensor, attend: Attend, open_T: Tensor | None = None
    ) -> Tensor:
        """Normed hidden rows; open_T [T] bool: which rows are open (None = all)."""
        if open_T is None:
            open_T = torch.ones_like(positions_T, dtype=torch.bool)
        sliding, full = (self.shape.table(kind, positions_T) for kind in (False, True))
        for i, layer in enumerate(self.layers):
            rotary = full if i in self.shape.full else sliding
            x_TD = layer(x_TD, rotary, i, attend, open_T)
        out: Tensor = self.norm(x_TD)
        return out
