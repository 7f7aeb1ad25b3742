"""Compiles the kernels beside this file, once a machine, and loads them. Needs nothing of torch, so
that it may go on while torch is imported.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("dense.cpp")
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno")
_NEEDED = {
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512vl": "-mavx512vl",
    "avx512dq": "-mavx512dq",
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
    "fma": "-mfma",
}
_TILES = {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16", "amx_int8": "-mamx-int8"}
"""Linux's names of what a CPU can do, and the compiler's flags for it."""
log = logging.getLogger("dinfer")
_one = threading.Lock()
"""Held by whoever compiles."""


def begin() -> None:
    """Starts to compile, where that is needed, while the caller goes on. What goes wrong is for
    `able` to tell.
    """

    def work() -> None:
        with suppress(OSError, subprocess.CalledProcessError):
            library()

    if _suits():
        threading.Thread(target=work, name="dinfer-compiler").start()


@cache
def able() -> bool:
    """Whether the kernels run here: on Linux, on a CPU with AVX-512's bfloat16 and int8
    instructions, with g++ (11 or later). Compiles them, which takes seconds the first time.
    """
    if not _suits():
        return False
    try:
        library()
    except OSError as error:
        why = str(error)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        why = said[0] if said else f"{error.cmd[0]} ended with exit status {error.returncode}"
    else:
        return True
    log.warning("the kernels could not be compiled, so steps run without them: %s", why)
    return False


def has_tiles() -> bool:
    """Whether the CPU has AMX's tiles and Linux lets this process use them."""
    arch_prctl, request, tile_data = 158, 0x1023, 18  # Linux has every process ask once
    return _has(_TILES) and ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def _suits() -> bool:
    return sys.platform.startswith("linux") and _has(_NEEDED) and _compiler() is not None


def _has(units: dict[str, str]) -> bool:
    return units.keys() <= _units()


@cache
def _units() -> frozenset[str]:
    """What the CPU can do, as Linux lists it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


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
    with _one:
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
