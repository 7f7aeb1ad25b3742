"""One product per active expert over rows that are grouped by expert.

S rows sorted by expert, E experts, D in, O out.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear


def grouped_linear(x_SD: Tensor, weight_EOD: Tensor, counts_E: Tensor) -> Tensor:
    """`x W_e^T` where the first `counts[0]` rows belong to expert 0, the next to expert 1, ...

    Experts without rows cost nothing: their weights are not read.
    """
    if _has_one_kernel(x_SD, weight_EOD):
        ends = counts_E.cumsum(0).to(torch.int32)
        return grouped_mm(x_SD, weight_EOD.transpose(1, 2), offs=ends)
    parts = [linear(x_SD[rows], weight_EOD[expert]) for expert, rows in active(counts_E)]
    return torch.cat(parts) if parts else x_SD.new_empty(0, weight_EOD.shape[1])


def active(counts_E: Tensor) -> list[tuple[int, slice]]:
    """The experts that have rows, each with its slice of the sorted rows."""
    found, start = [], 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            found.append((expert, slice(start, start + count)))
        start += count
    return found


def _has_one_kernel(x: Tensor, weight_EOD: Tensor) -> bool:
    """Whether torch brings a grouped product: bfloat16 on CUDA from Hopper on, rows of whole 16
    bytes.
    """
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in weight_EOD.shape[1:])
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def grouped_linear_reference(x_SD: Tensor, weight_EOD: Tensor, counts_E: Tensor) -> Tensor:
    """The same in float64, row by row, as the formula stands."""
    owner = torch.arange(len(counts_E)).repeat_interleave(counts_E.cpu())
    rows = [
        linear(x.double(), weight_EOD[e].double())
        for x, e in zip(x_SD, owner.tolist(), strict=True)
    ]
    return torch.stack(rows) if rows else x_SD.new_empty(0, weight_EOD.shape[1]).double()
