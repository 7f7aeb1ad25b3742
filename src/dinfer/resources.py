"""What this process may use of the machine: CPUs and memory, also inside a container.

psutil is used because it knows free memory and CPU times on Linux, macOS and Windows; it does not
read control groups, so their limits are read here (docs.kernel.org, cgroup-v2 and cgroup-v1).
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2 ** 63."""


def allowed_cpus() -> list[int]:
    """Numbers of the CPUs that the scheduler may give this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """CPUs that may be kept busy at once: those allowed, or fewer where a control group has a quota
    (at least 1).
    """
    quotas = [len(allowed_cpus()), *_quotas(root, membership)]
    return max(1, math.ceil(min(quotas)))


def available_memory(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Bytes that can be taken without swapping: what the system can free counts (page cache), and
    the limits of control groups hold.
    """
    return max(0, min([psutil.virtual_memory().available, *_headrooms(root, membership)]))


def _quotas(root: Path, membership: Path) -> Iterator[float]:
    for folder in _groups(root, membership, "cpu"):
        quota, period = _words(folder / "cpu.max", 2) or ("max", "1")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
        used = _number(folder / "cpu.cfs_quota_us")
        span = _number(folder / "cpu.cfs_period_us")
        if used and span and used > 0:
            yield used / span


def _headrooms(root: Path, membership: Path) -> Iterator[int]:
    for folder in _groups(root, membership, "memory"):
        for limit_file, used_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit - used + _statistic(folder / "memory.stat", cache)


def _groups(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's groups and of those above them: a limit of each holds. In a
    container the path may be that of the host, while the mounted folder is already our group.
    """
    for line in _text(membership).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        while folder != top and top in folder.parents:
            yield folder
            folder = folder.parent
        yield top


def _statistic(path: Path, name: str) -> int:
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), 0)


def _number(path: Path) -> int | None:
    (word,) = _words(path, 1) or ("",)
    return int(word) if word.lstrip("-").isdigit() else None


def _words(path: Path, count: int) -> list[str] | None:
    words = _text(path).split()
    return words if len(words) == count else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
