"""The pre-norm decoder stack that LLaDA, SDAR and their kin share: embedding, layers, norm, head.

T rows, D hidden, V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from dinfer.nn.attention import Attend, SelfAttention
from dinfer.nn.linear import Embedding, Linear
from dinfer.nn.norm import RMSNorm
from dinfer.nn.rope import Rotary, rotary_table


@dataclass(frozen=True)
class Shape:
    """Sizes of a stack. `qk_norm`: per-head RMS norm of q and k before the rotary embedding."""

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


class GatedMLP(nn.Module):
    """`down(silu(gate x) * up x)` (SwiGLU, arXiv 2002.05202) with gate and up in one product."""

    def __init__(self, size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * intermediate)
        self.down = Linear(intermediate, size)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TD).chunk(2, dim=-1)
        out: Tensor = self.down(nn.functional.silu(gate) * up)
        return out


class Layer(nn.Module):
    """`x += attention(norm x)`, `x += mlp(norm x)`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        eps = shape.norm_eps if shape.qk_norm else None
        self.attention = SelfAttention(
            shape.hidden, shape.heads, shape.kv_heads, shape.head_size, eps
        )
        self.mlp_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate)

    def forward(self, x_TD: Tensor, rotary: Rotary, layer: int, attend: Attend) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), rotary, layer, attend)
        out: Tensor = x_TD + self.mlp(self.mlp_norm(x_TD))
        return out


class Transformer(nn.Module):
    """A stack over any ragged set of rows. `forward` gives normed hidden rows; `head` turns rows
    into logits.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.head = Linear(shape.hidden, shape.vocab)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Input rows [T, D] of token ids [T]."""
        rows: Tensor = self.embedding(tokens_T)
        return rows

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        rotary = rotary_table(positions_T, self.shape.head_size, self.shape.rope_theta)
        for number, layer in enumerate(self.layers):
            x_TD = layer(x_TD, rotary, number, attend)
        out: Tensor = self.norm(x_TD)
        return out
