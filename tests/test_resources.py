"""What this process may use: control groups of both versions; threads beside busy neighbours."""

from pathlib import Path

import psutil
import pytest
import torch

from dinfer import resources
from dinfer.resources import available_memory, cpu_limit
from dinfer.runner.threads import INTERVAL, ThreadGovernor


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "allowed_cpus", lambda: [0, 1, 2, 3])


@pytest.mark.usefixtures("four_cpus")
def test_cgroup_2(tmp_path: Path) -> None:
    """The tightest of the group and those above it; page cache that can be dropped is free."""
    write(
        tmp_path,
        {
            "self": "0::/box/job\n",
            "box/cpu.max": "150000 100000",
            "box/job/cpu.max": "max 100000",
            "box/memory.max": "max",
            "box/memory.current": "7",
            "box/job/memory.max": "1000000",
            "box/job/memory.current": "900000",
            "box/job/memory.stat": "anon 100000\ninactive_file 800000\n",
        },
    )
    assert cpu_limit(tmp_path, tmp_path / "self") == 2
    assert available_memory(tmp_path, tmp_path / "self") == 900000


@pytest.mark.usefixtures("four_cpus")
def test_cgroup_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self": "5:cpu,cpuacct:/job\n4:memory:/job\n",
            "cpu/job/cpu.cfs_quota_us": "50000",
            "cpu/job/cpu.cfs_period_us": "100000",
            "memory/job/memory.limit_in_bytes": "5000",
            "memory/job/memory.usage_in_bytes": "2000",
            "memory/memory.limit_in_bytes": str(2**63 - 4096),
            "memory/memory.usage_in_bytes": "2000",
        },
    )
    assert cpu_limit(tmp_path, tmp_path / "self") == 1
    assert available_memory(tmp_path, tmp_path / "self") == 3000


@pytest.mark.usefixtures("four_cpus")
def test_no_control_groups(tmp_path: Path) -> None:
    """As on macOS and Windows."""
    assert cpu_limit(tmp_path / "none", tmp_path / "self") == 4
    free = available_memory(tmp_path / "none", tmp_path / "self")
    assert 0 < free <= psutil.virtual_memory().total


def test_threads_leave_out_busy_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores; others use two of them for a while, then none, then all."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("dinfer.runner.threads.allowed_cpus", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("dinfer.runner.threads.cpu_limit", lambda: 4)
    chosen: list[int] = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    now, used = 0.0, 0.0
    governor = ThreadGovernor(clock=lambda: now, others=lambda: used)
    for busy, expected in ((0.1, 4), (2.0, 2), (2.1, 2), (0.0, 4), (4.0, 1), (0.2, 4)):
        now += INTERVAL / 2
        used += busy * INTERVAL / 2
        governor.adjust()  # too early to tell
        now += INTERVAL / 2 + 1e-6
        used += busy * INTERVAL / 2
        governor.adjust()
        assert chosen[-1] == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    fixed = ThreadGovernor(clock=lambda: now, others=lambda: used)
    now, used, count = now + 1, used + 4, len(chosen)
    fixed.adjust()
    assert len(chosen) == count
