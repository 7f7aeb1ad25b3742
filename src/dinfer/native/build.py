"""Compiles the kernels beside this file, once a machine, and loads them."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("dense.cpp")
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno")
_NEEDED = {
    "avx512_f": "-mavx512f",
    "avx512_bw": "-mavx512bw",
    "avx512_vl": "-mavx512vl",
    "avx512_dq": "-mavx512dq",
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
    "fma3": "-mfma",
}
_TILES = {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16", "amx_int8": "-mamx-int8"}
"""torch's names of what a CPU can do, and the compiler's flags for it."""


def able() -> bool:
    """Whether this machine can compile and run the kernels."""
    known = torch.cpu.get_capabilities()
    units = all(known.get(name, False) for name in _NEEDED)
    return sys.platform.startswith("linux") and units and _compiler() is not None


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("clang++")


def _flags() -> list[str]:
    known = torch.cpu.get_capabilities()
    tiles = all(known.get(name, False) for name in _TILES) and _may_use_tiles()
    return [*_FLAGS, *_NEEDED.values(), *(_TILES.values() if tiles else ())]


def _may_use_tiles() -> bool:
    """Asks Linux for AMX's registers, which a process has to do once."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dinfer"


@cache
def library() -> ctypes.CDLL:
    """The kernels. The first call on a machine takes seconds; the result stays in the user's cache
    folder, under a name that tells source and flags apart. Raises OSError or CalledProcessError.
    """
    compiler, flags = _compiler(), _flags()
    assert compiler is not None, "ask able() first"
    sources = sorted(_SOURCE.parent.glob("*.h")) + [_SOURCE]
    text = b"".join(path.read_bytes() for path in sources)
    name = hashlib.sha256(text + " ".join([compiler, *flags]).encode()).hexdigest()[:16]
    path = _folder() / f"dense-{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run(
                [compiler, *flags, str(_SOURCE), "-o", str(made)], check=True, capture_output=True
            )
            made.replace(path)  # at once, so that no other process sees half a file
    return ctypes.CDLL(str(path))
