"""What a benchmark ran on, and how fast that can read memory and multiply matrices."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dinfer

READ_MOST = 1 << 30
"""Most bytes that the reading rate is measured on."""


def settings() -> dict[str, Any]:
    """Versions, processor, threads and load: what every result is printed with."""
    cuda = torch.cuda.is_available()
    return {
        "dinfer": dinfer.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2] for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of one call, the device's queue emptied before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Timing:
    """Median and range of repeated measurements, in the unit of the values; p95: what 95 % of them
    do not exceed.
    """

    median: float
    least: float
    most: float
    repeats: int
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Timing":
        """Sums the values up."""
        ordered = sorted(values)
        rank = math.ceil(0.95 * len(ordered))
        middle = statistics.median(ordered)
        return cls(middle, ordered[0], ordered[-1], len(ordered), ordered[rank - 1])


def interleaved(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Values of each side in the order A B A B ..., so that a drifting machine hits both alike."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            found[name].append(side())
    return found


def read_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Bytes a second of reading `size` bytes (1 GiB at most), as one step reads its weights: what
    fits in a cache is read from there.
    """
    count = max(1, min(size, READ_MOST) // dtype.itemsize)
    data = torch.ones(count, dtype=dtype, device=device)
    view = data.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    best = min(seconds_of(view.max, device) for _ in range(5))
    return count * dtype.itemsize / best


def product_rate(dtype: torch.dtype, device: torch.device, size: int = 2048) -> float:
    """Operations a second of a large matrix product, a multiply-add counted as two."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = min(seconds_of(lambda: torch.nn.functional.linear(a, b), device) for _ in range(5))
    return float(2 * size**3 / best)
