"""Linear layers and embeddings without first weights: a checkpoint, or training, brings them.

Drawing weights that are thrown away takes time, and on the meta device it loads torch's compiler.
"""

from torch import nn


class Linear(nn.Linear):
    """`x W^T` without bias; the weight is not initialised."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__(size, out, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: see the module."""


class Embedding(nn.Embedding):
    """A table of rows that is not initialised."""

    def reset_parameters(self) -> None:
        """Nothing: see the module."""
