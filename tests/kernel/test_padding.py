"""Numbers of rows that repeat."""

import pytest
import torch

from dinfer.kernel.padding import num_padding_rows, pad_rows

CPU = torch.device("cpu")


def test_few_numbers_and_little_waste() -> None:
    totals = {rows: rows + num_padding_rows(rows, CPU) for rows in range(1, 8193)}
    for rows, total in totals.items():
        assert 0 <= total - rows <= max(15, rows / 16)
    for low in (2**n for n in range(4, 13)):
        assert len({totals[rows] for rows in range(low + 1, 2 * low + 1)}) <= 16


def test_a_gpu_takes_rows_as_they_are() -> None:
    assert num_padding_rows(333, torch.device("cuda")) == 0


@pytest.mark.parametrize("rows", [1, 16, 17, 333])
def test_zeros_lie_behind(rows: int) -> None:
    x = torch.randn(rows, 3)
    full = pad_rows(x)
    assert len(full) == rows + num_padding_rows(rows, CPU)
    assert torch.equal(full[:rows], x)
    assert not full[rows:].any()
