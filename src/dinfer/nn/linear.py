"""Linear layers and embeddings without first weights: a checkpoint, or training, brings them.

Drawing weights that are thrown away takes time, and on the meta device it loads torch's compiler.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dinfer.kernel.grouped_gemm import grouped_linear


class Linear(nn.Linear):
    """`x W^T`, plus a bias where asked for; nothing is initialised."""

    def __init__(self, size: int, out: int, bias: bool = False) -> None:
        super().__init__(size, out, bias=bias)

    def reset_parameters(self) -> None:
        """Nothing: see the module."""

    def columns(self, x_TD: Tensor, start: int, stop: int) -> Tensor:
        """A run of the outputs [T, stop - start]."""
        bias = None if self.bias is None else self.bias[start:stop]
        return linear(x_TD, self.weight[start:stop], bias)


class GroupedLinear(nn.Module):
    """`count` linear maps of one size; each takes its own run of the rows."""

    def __init__(self, count: int, size: int, out: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.empty(count, out, size))

    def forward(self, x_SD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by map, `counts_E[e]` of them for map e."""
        return grouped_linear(x_SD, self.weight, counts_E)


class Embedding(nn.Embedding):
    """A table of rows that is not initialised."""

    def reset_parameters(self) -> None:
        """Nothing: see the module."""
