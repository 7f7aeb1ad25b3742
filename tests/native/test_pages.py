"""Huge pages change where memory lies, and nothing else."""

import sys
from pathlib import Path

import pytest
import torch

from dinfer.native.pages import collapse, prefer

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def in_huge_pages() -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(x.split()[1]) for x in lines if x.startswith("AnonHugePages"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise of Linux")
def test_memory_moves_and_keeps_what_it_holds() -> None:
    kept = torch.arange(16 << 20)  # 128 MiB
    untouched = torch.empty(64 << 20)
    before = in_huge_pages()
    collapse()
    assert torch.equal(kept, torch.arange(16 << 20))
    if not SETTING.exists() or "[never]" in SETTING.read_text():
        pytest.skip("this system has no huge pages")
    # MADV_COLLAPSE may find too few free ones; what was never touched takes none.
    assert before <= in_huge_pages() < before + (512 << 20)
    assert untouched.nbytes == 256 << 20


@pytest.mark.skipif(
    "[never]" in (SETTING.read_text() if SETTING.exists() else "[never]"), reason="none"
)
def test_new_memory() -> None:
    fresh = torch.empty(16 << 20)  # 64 MiB
    before = in_huge_pages()
    prefer(fresh.data_ptr(), fresh.nbytes)
    fresh.fill_(1)
    assert in_huge_pages() - before <= fresh.nbytes
    assert torch.equal(fresh, torch.ones(16 << 20))


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("dinfer.native.pages._allocated", lambda: pytest.fail("asked"))
    collapse()
    prefer(0, 1 << 30)
