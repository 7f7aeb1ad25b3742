"""Self-attention of a ragged set of rows; who sees whom is the caller's matter.

T rows, D hidden, H query heads, K key/value heads, d head size.
"""

from typing import Protocol

from torch import Tensor, nn

from dinfer.nn import rope
from dinfer.nn.linear import Linear
from dinfer.nn.norm import RMSNorm


class Attend(Protocol):
    """Stores the rows' keys and values for `layer` and gives each query row the mix of the values
    it may see.
    """

    def __call__(self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        """Returns the mixed values [T, H, d]; scores are scaled by 1/sqrt(d)."""
        ...


class SelfAttention(nn.Module):
    """Fused qkv projection, optional per-head RMS norm of q and k, rotary embedding, output
    projection.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        qk_norm_eps: float | None,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        self.qkv = Linear(size, (heads + 2 * kv_heads) * head_size, qkv_bias)
        self.out = Linear(heads * head_size, size)
        self.q_norm = RMSNorm(head_size, qk_norm_eps) if qk_norm_eps is not None else nn.Identity()
        self.k_norm = RMSNorm(head_size, qk_norm_eps) if qk_norm_eps is not None else nn.Identity()

    def forward(self, x_TD: Tensor, rotary: rope.Rotary, layer: int, attend: Attend) -> Tensor:
        rows = self.qkv(x_TD).view(len(x_TD), -1, self.head_size)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        mixed = attend(
            layer, rope.rotate(self.q_norm(q), rotary), rope.rotate(self.k_norm(k), rotary), v
        )
        out: Tensor = self.out(mixed.reshape(len(x_TD), -1))
        return out
