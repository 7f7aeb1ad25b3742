"""Which of the kernels' paths this machine can take, and how they are compiled and loaded. Needs
nothing of torch, so that it may go on while torch is imported.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from dinfer.errors import RequestError
from dinfer.native.library_cache import CompileError, load_or_compile

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


def begin() -> None:
    """Starts to compile, where that is needed, while the caller goes on. What goes wrong is for
    `able` to tell.
    """

    def work() -> None:
        with suppress(OSError, CompileError):
            library()

    if chosen() is not None and _compiler():
        threading.Thread(target=work, name="dinfer-compiler").start()


@cache
def able() -> bool:
    """Whether the kernels run here: on Linux, on a CPU that one of the paths is for, with g++ or
    clang++ (11 or later). Compiles them, which takes seconds the first time. What stands in the way
    is said in one line.
    """
    if chosen() is None:
        return False
    try:
        library()
    except (OSError, CompileError) as error:
        log.warning(
            "the kernels could not be compiled, so steps run without them and take several times "
            "as long: %s",
            error,
        )
        return False
    return True


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


@cache
def _units() -> frozenset[str]:
    """What the CPU can do, as Linux lists it; nothing where the list cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def _compiler() -> list[str]:
    """The command, with arguments where CXX has some (`ccache g++`); empty = there is none."""
    given = os.environ.get("CXX")
    commands = [shlex.split(given)] if given else [["g++"], ["clang++"]]
    return next((each for each in commands if each and shutil.which(each[0])), [])


def library(path: str | None = None) -> ctypes.CDLL:
    """The kernels for a path (None: the chosen one). Raises OSError or CompileError."""
    path = path or chosen()
    assert path is not None, "ask able() first"
    return _library(path)


@cache
def _library(path: str) -> ctypes.CDLL:
    command = [*_compiler(), *_FLAGS, *filter(None, PATHS[path].values())]
    sources = [*sorted(_SOURCE.parent.glob("*.h")), _SOURCE]
    text = b"".join(source.read_bytes() for source in sources)
    digest = hashlib.sha256(text + " ".join(command).encode()).hexdigest()
    return _declared(load_or_compile(f"{path}-{digest[:16]}", partial(_compile, command)))


def _compile(command: list[str], out: Path) -> None:
    if not _compiler():
        given = os.environ.get("CXX")
        raise CompileError(
            f"CXX is {given!r}, which is no command here"
            if given
            else "there is no C++ compiler; install g++ or clang++"
        )
    try:
        subprocess.run([*command, str(_SOURCE), "-o", str(out)], check=True, capture_output=True)
    except OSError as error:
        raise CompileError(str(error)) from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        why = said[0] if said else f"{command[0]} ended with exit status {error.returncode}"
        raise CompileError(why) from error


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
