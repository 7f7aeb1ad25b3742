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

from dinfer.errors import RequestError

_SOURCE = Path(__file__).with_name("dense.cpp")
_FLAGS = (
    "-O3", "-std=c++17", "-pthread", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=fast",
)  # fmt: skip
_AVX2 = {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"}
_AVX512 = _AVX2 | {
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512vl": "-mavx512vl",
    "avx512dq": "-mavx512dq",
}
_AVX512_VNNI = _AVX512 | {"avx512_vnni": "-mavx512vnni"}
_AVX512_BF16 = _AVX512_VNNI | {"avx512_bf16": "-mavx512bf16"}
_TILES = {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16", "amx_int8": "-mamx-int8"}
PATHS = {
    "neon": {"asimd": "-march=armv8-a"},
    "neon_dot": {"asimd": "", "asimddp": "-march=armv8.2-a+dotprod"},
    "avx2": _AVX2,
    "avx2_vnni": _AVX2 | {"avx_vnni": "-mavxvnni"},
    "avx512": _AVX512,
    "avx512_vnni": _AVX512_VNNI,
    "avx512_bf16": _AVX512_BF16,
    "amx": _AVX512_BF16 | _TILES,
}
"""What the kernels are compiled for, from the slowest to the fastest: Linux's names of what a CPU
must have, and the compiler's flags for it.
"""
CHOICE = "DINFER_KERNELS"
"""The environment variable that names a path, or `off`."""
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
    """Whether the kernels run here: on Linux, on a CPU that one of the paths is for, with g++ or
    clang++ (11 or later). Compiles them, which takes seconds the first time.
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


def chosen() -> str | None:
    """The path that the kernels take: the fastest one, or what DINFER_KERNELS says; None = none.
    Raises RequestError for a path that this machine does not have.
    """
    asked = os.environ.get(CHOICE)
    if not asked:
        return next(iter(supported()[::-1]), None)
    if asked == "off":
        return None
    if asked not in supported():
        allowed = ", ".join(["off", *supported()])
        raise RequestError(f"{CHOICE} is {asked!r}; this machine allows {allowed}.")
    return asked


@cache
def supported() -> tuple[str, ...]:
    """The paths that this machine can take, from the slowest to the fastest."""
    if not sys.platform.startswith("linux"):
        return ()
    found = [path for path, units in PATHS.items() if units.keys() <= _units()]
    return tuple(path for path in found if path != "amx" or _may_use_tiles())


def _may_use_tiles() -> bool:
    """Whether Linux lets this process use AMX's tiles, which every process has to ask once."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


def _suits() -> bool:
    return chosen() is not None and _compiler() is not None


@cache
def _units() -> frozenset[str]:
    """What the CPU can do, as Linux lists it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def _compiler() -> str | None:
    given = os.environ.get("CXX")
    return shutil.which(given) if given else shutil.which("g++") or shutil.which("clang++")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dinfer"


def library(path: str | None = None) -> ctypes.CDLL:
    """The kernels for a path (None: the chosen one), from the user's cache folder, where they lie
    under a name that tells sources and flags apart. Raises OSError or CalledProcessError.
    """
    path = path or chosen()
    assert path is not None, "ask able() first"
    return _library(path)


@cache
def _library(path: str) -> ctypes.CDLL:
    compiler = _compiler()
    assert compiler is not None, "ask able() first"
    flags = [*_FLAGS, *filter(None, PATHS[path].values())]
    sources = [*sorted(_SOURCE.parent.glob("*.h")), _SOURCE]
    text = b"".join(path.read_bytes() for path in sources)
    name = hashlib.sha256(text + " ".join([compiler, *flags]).encode()).hexdigest()[:16]
    file = _folder() / f"{path}-{name}.so"
    with _one:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                made = Path(folder) / file.name
                command = [compiler, *flags, str(_SOURCE), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True)
                made.replace(file)  # at once, so that no other process sees half a file
        return _declared(ctypes.CDLL(str(file)))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The functions of dense.cpp with the types of their arguments."""
    at, many, few = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.form.argtypes = []
    library.body.argtypes = [*[at] * 7, many, many, many, few, few]
    library.product.argtypes = [at, at, many, many, many, few, few, few, at]
    library.likeliest.argtypes = [at, many, at, at, many, many, many, few, few, at, at]
    for function in (library.body, library.product, library.likeliest):
        function.restype = None
    return library
