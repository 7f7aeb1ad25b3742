"""How many threads a step takes on a CPU that other processes use as well.

The threads of a step wait for one another many times. Where another process holds one of their
cores, each wait lasts until the scheduler has let that process run for its share, and a step takes
ten times as long with two threads as with one. So the step leaves out the cores that others keep
busy.
"""

import os
import time
from collections.abc import Callable

import psutil
import torch

from dinfer.resources import allowed_cpus, cpu_limit

INTERVAL = 0.2
"""Seconds between two looks at the CPU times, which the system counts in units of 10 ms."""

TOLERANCE = 0.25
"""Cores that others may use without a thread less."""


class ThreadGovernor:
    """Sets torch's number of threads before a step, by what other processes did since the last
    look. Does nothing where the user chose a number (OMP_NUM_THREADS), or has only one.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        others: Callable[[], float] | None = None,
    ) -> None:
        """clock: seconds. others: CPU seconds that other processes have used so far, on the CPUs
        that this one may use.
        """
        self.most = min(torch.get_num_threads(), cpu_limit())
        self.threads = torch.get_num_threads()
        self._enabled = self.threads > 1 and "OMP_NUM_THREADS" not in os.environ
        self._cpus = len(allowed_cpus())
        self._clock, self._others = clock, others or _seconds_of_others
        if self._enabled:
            self._looked, self._seen = clock(), self._others()
            self._set(self.most)

    def adjust(self) -> None:
        """To be called before a step, by the thread that runs it."""
        if not self._enabled:
            return
        now = self._clock()
        if now - self._looked < INTERVAL:
            return
        seen = self._others()
        busy = (seen - self._seen) / (now - self._looked)
        self._looked, self._seen = now, seen
        self._set(max(1, min(self.most, int(self._cpus - busy + TOLERANCE))))

    def _set(self, threads: int) -> None:
        if threads != self.threads:
            torch.set_num_threads(threads)
            self.threads = threads


def _seconds_of_others() -> float:
    every = psutil.cpu_times(percpu=True)
    mine = [every[cpu] for cpu in allowed_cpus() if cpu < len(every)] or every
    used = sum(times.user + times.system + getattr(times, "nice", 0.0) for times in mine)
    return float(used) - time.process_time()
