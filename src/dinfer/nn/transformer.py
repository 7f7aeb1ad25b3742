"""The pre-norm decoder stack that LLaDA, SDAR and their kin share: embedding, layers, norm, head.

T rows, D hidden, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import embedding

from dinfer.nn.attention import Attend, SelfAttention
from dinfer.nn.linear import Embedding, Linear
from dinfer.nn.mlp import GatedMLP
from dinfer.nn.moe import Mixture, MixtureMLP
from dinfer.nn.norm import RMSNorm
from dinfer.nn.rope import RopeScaling, Rotary, rotary_table


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a stack.

    qk_norm: per-head RMS norm of q and k before the rotary embedding. qkv_bias: q, k and v have
    biases. rotary: channels of a head that are rotated; 0 = all. mixture: experts in place of the
    MLP; None = dense (and `intermediate` is that of the dense layers).
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    context: int
    qk_norm: bool = False
    tied: bool = False
    qkv_bias: bool = False
    rotary: int = 0
    mixture: Mixture | None = None
    rope_scaling: RopeScaling | None = None

    def kv_at(self, layer: int) -> tuple[int, int]:
        """Key/value heads of a layer, and their size."""
        return self.kv_heads, self.head_size

    def window_at(self, layer: int) -> int | None:
        """How many positions a row of a layer sees, its own among them; None = all there are."""
        return None

    def rotary_rows(self, positions_T: Tensor) -> Rotary:
        """cos and sin of rows at these positions."""
        channels = self.rotary or self.head_size
        return rotary_table(positions_T, channels, self.rope_theta, scaling=self.rope_scaling)

    @property
    def stored(self) -> int:
        """Numbers that are stored for one position: keys and values of all layers."""
        return sum(2 * math.prod(self.kv_at(layer)) for layer in range(self.layers))

    def mixture_at(self, layer: int) -> Mixture | None:
        """The mixture of a layer; None where it is dense."""
        return self.mixture if self.mixture and layer >= self.mixture.first else None

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a row does not run through."""
        if self.mixture is None:
            return 0
        idle = self.mixture.experts - self.mixture.routing.top
        layers = max(0, self.layers - self.mixture.first)
        return layers * idle * 3 * self.hidden * self.mixture.intermediate


class Layer(nn.Module):
    """`x += attention(norm x)`, `x += mlp(norm x)`."""

    def __init__(self, shape: ModelConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        eps = shape.norm_eps if shape.qk_norm else None
        self.attention = SelfAttention(
            shape.hidden, shape.heads, shape.kv_heads, shape.head_size, eps, shape.qkv_bias
        )
        self.mlp_norm = RMSNorm(shape.hidden, shape.norm_eps)
        mixture = shape.mixture_at(number)
        self.mlp = (
            MixtureMLP(shape.hidden, mixture)
            if mixture
            else GatedMLP(shape.hidden, shape.intermediate)
        )

    def forward(self, x_TD: Tensor, rotary: Rotary, layer: int, attend: Attend) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), rotary, layer, attend)
        out: Tensor = x_TD + self.mlp(self.mlp_norm(x_TD))
        return out


class Transformer(nn.Module):
    """A stack over any ragged set of rows. `forward` gives normed hidden rows; `head` turns rows
    into logits.

    conditioned: it makes the inputs of open rows with `condition`, and `forward` also takes which
    rows are open, [T] bool.
    """

    conditioned = False

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(self.layer(shape, i) for i in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.head = Linear(shape.hidden, shape.vocab)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def layer(self, shape: Any, number: int) -> nn.Module:
        """A layer of the stack."""
        return Layer(shape, number)

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Input rows [T, D] of token ids [T]."""
        # Not as a module, whose call costs a small step more than the rows themselves.
        return embedding(tokens_T, self.embedding.weight)

    def condition(self, x_RD: Tensor, soft_RD: Tensor) -> Tensor:
        """Inputs of open rows, from what `embed` gives and the mean embeddings that the step before
        expected there (0 in a first step).
        """
        raise NotImplementedError

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        rotary = self.shape.rotary_rows(positions_T)
        for number, layer in enumerate(self.layers):
            x_TD = layer(x_TD, rotary, number, attend)
        out: Tensor = self.norm(x_TD)
        return out
