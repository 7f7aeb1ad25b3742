"""The gated feed-forward network."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from dinfer.nn.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_pytorch_tanh": partial(nn.functional.gelu, approximate="tanh"),
}
"""By their names in config files."""


class GatedMLP(nn.Module):
    """`down(act(gate x) * up x)` (arXiv 2002.05202) with gate and up in one product."""

    def __init__(self, size: int, intermediate: int, activation: str = "silu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_up = Linear(size, 2 * intermediate)
        self.down = Linear(intermediate, size)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TD).chunk(2, dim=-1)
        out: Tensor = self.down(self.activation(gate) * up)
        return out
