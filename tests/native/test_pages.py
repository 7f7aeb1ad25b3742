"""Huge pages change where memory lies, and nothing else."""

import ctypes
import mmap
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


def flags_of(address: int) -> list[str]:
    """What Linux notes of the mapping that holds an address; `hg`: huge pages are wanted."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(x, 16) for x in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("no such address")


@pytest.mark.skipif(not SETTING.exists(), reason="this system has no huge pages")
def test_new_memory_is_to_lie_in_huge_pages() -> None:
    # A mapping of its own: what malloc gives may lie where another test asked already.
    fresh = mmap.mmap(-1, 64 << 20)
    start = ctypes.addressof(ctypes.c_char.from_buffer(fresh))
    middle = start + (32 << 20)
    assert "hg" not in flags_of(middle)
    prefer(start, 64 << 20)
    assert "hg" in flags_of(middle)


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("dinfer.native.pages._allocated", lambda: pytest.fail("asked"))
    collapse()
    prefer(0, 1 << 30)
