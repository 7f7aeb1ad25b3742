"""The gated feed-forward network."""

from torch import Tensor, nn

from dinfer.nn.linear import Linear


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
