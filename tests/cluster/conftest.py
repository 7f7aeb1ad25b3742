"""A Ray cluster of this process, and what runs in it."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Four CPUs, whatever the machine has: engines of tiny models take turns."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def actors(name: str, parent: int | None = None) -> list[int]:
    """Process ids of the actors of that class, below a process (None: this one)."""
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        try:
            if child.cmdline()[:1] == [f"ray::{name}"] or name in child.name():
                found.append(child.pid)
        except psutil.Error:  # it has just ended
            continue
    return found


def kill(pid: int) -> None:
    """Without a word."""
    os.kill(pid, signal.SIGKILL)
