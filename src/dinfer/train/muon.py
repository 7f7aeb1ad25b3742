"""Muon: momentum whose direction is orthogonalised (Keller Jordan,
https://kellerjordan.github.io/posts/muon/).

`torch.optim.Muon` runs its Newton-Schulz steps in bfloat16, which a CPU without bfloat16 units
does slowly, and one matrix at a time; here matrices of one shape go together, in float32.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest-orthogonal directions of a stack [n, rows, columns] by the quintic Newton-Schulz
    iteration.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.mT if tall else x
    return found


class Muon(torch.optim.Optimizer):
    """Nesterov momentum 0.95, orthogonalised, scaled by sqrt(max(1, rows/columns)), decoupled
    weight decay.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for same in by_shape.values():
                self._update(same, group)

    def _update(self, same: list[Tensor], group: dict[str, float]) -> None:
        directions = []
        for parameter in same:
            assert parameter.grad is not None
            trace = self.state[parameter].setdefault("trace", torch.zeros_like(parameter))
            trace.lerp_(parameter.grad, 1 - group["momentum"])
            directions.append(parameter.grad.lerp(trace, group["momentum"]))
        scale = max(1.0, same[0].shape[0] / same[0].shape[1]) ** 0.5
        for parameter, update in zip(same, orthogonalise(torch.stack(directions)), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                update, alpha=-group["lr"] * scale
            )
