"""Compiles the kernels beside this file, once a machine, and loads them."""

import ctypes
import hashlib
import logging
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
log = logging.getLogger("dinfer")


@cache
def able() -> bool:
    """Whether the kernels run here: on Linux, on a CPU with AVX-512's bfloat16 and int8
    instructions, with g++ (11 or later). Compiles them, which takes seconds the first time.
    """
    if not (sys.platform.startswith("linux") and _has(_NEEDED) and _compiler()):
        return False
    try:
        library()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        first = said.decode(errors="replace").strip().splitlines()[:1]
        log.warning("the kernels could not be compiled, so torch's compiler is used: %s", *first)
        return False
    return True


def has_tiles() -> bool:
    """Whether the CPU has AMX's tiles and Linux lets this process use them."""
    arch_prctl, request, tile_data = 158, 0x1023, 18  # Linux has every process ask once
    return _has(_TILES) and ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def _has(units: dict[str, str]) -> bool:
    known = torch.cpu.get_capabilities()
    return all(known.get(name, False) for name in units)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dinfer"


@cache
def library(tiles: bool | None = None) -> ctypes.CDLL:
    """The kernels, from the user's cache folder, where they lie under a name that tells sources
    and flags apart. tiles: with AMX or without; None = as this machine can. Raises OSError or
    CalledProcessError.
    """
    if tiles is None:
        return library(has_tiles())
    compiler = _compiler()
    assert compiler is not None, "ask able() first"
    flags = [*_FLAGS, *_NEEDED.values(), *(_TILES.values() if tiles else ())]
    sources = [*sorted(_SOURCE.parent.glob("*.h")), _SOURCE]
    text = b"".join(path.read_bytes() for path in sources)
    name = hashlib.sha256(text + " ".join([compiler, *flags]).encode()).hexdigest()[:16]
    path = _folder() / f"dense-{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *flags, str(_SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)
            made.replace(path)  # at once, so that no other process sees half a file
    return _declared(ctypes.CDLL(str(path)))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The functions of dense.cpp with the types of their arguments."""
    at, many, few = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.raised.argtypes = []
    library.body.argtypes = [*[at] * 6, many, many, few]
    library.product.argtypes = [at, at, many, many, many, few, at]
    library.likeliest.argtypes = [at, many, at, at, many, many, many, few, at, at]
    for function in (library.body, library.product, library.likeliest):
        function.restype = None
    return library
