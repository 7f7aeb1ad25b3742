"""Numbers of rows that repeat.

oneDNN, which does a CPU's products, makes a program for every number of rows that it meets; for a
small model that takes as long as ten products with it (1.1 ms against 0.1 for 256 by 256 weights).
So ragged steps are filled up to one of sixteen numbers of rows for each power of two.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_FEW = 16


def num_padding_rows(rows: int, device: torch.device) -> int:
    """How many rows more to run, at most a sixteenth or 15; none off the CPU, nor for a few rows,
    each number of which soon has its program.
    """
    if device.type != "cpu" or rows <= _FEW:
        return 0
    return -rows % max(_FEW, 1 << rows.bit_length() - 5)


def pad_rows(x_TD: Tensor) -> Tensor:
    """The rows, and zeros behind them."""
    more = num_padding_rows(len(x_TD), x_TD.device)
    return pad(x_TD, (0, 0, 0, more)) if more else x_TD
