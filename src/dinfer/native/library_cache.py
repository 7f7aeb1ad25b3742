"""A shared library that is compiled once a machine and kept in the user's cache folder.

A damaged file is made again, processes that need it at the same time compile it once, and where
the folder cannot be used the library lives in a folder of this process.
"""

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Compile = Callable[[Path], None]
"""Writes the library to a path. Raises CompileError."""
_DIGEST = hashlib.sha256
_DIGEST_SIZE = _DIGEST().digest_size
log = logging.getLogger("dinfer")


class CompileError(Exception):
    """The compiler could not be started, or refused. The message is one line."""


def load_or_compile(name: str, compile: Compile) -> ctypes.CDLL:
    """The library `name` from the cache folder; it is compiled where it is missing or damaged.
    `name` must tell apart whatever makes two libraries differ. Raises CompileError, and OSError
    where the library cannot be loaded.
    """
    try:
        return _from_folder(_cache_folder(), name, compile)
    # Path.home() raises RuntimeError for a user who has no home.
    except (OSError, RuntimeError) as error:
        log.warning(
            "the cache folder of the kernels cannot be used, so every process compiles them anew: "
            "%s. XDG_CACHE_HOME names another folder.",
            error,
        )
    with tempfile.TemporaryDirectory(prefix="dinfer-") as own:
        # A loaded library stays mapped when its file is gone.
        return _from_folder(Path(own), name, compile)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dinfer"


def _from_folder(folder: Path, name: str, compile: Compile) -> ctypes.CDLL:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.so"
    if not _is_whole(file):
        with _locked(folder / f"{name}.lock"):
            if not _is_whole(file):  # another process may have made it meanwhile
                _make(file, compile)
    return ctypes.CDLL(str(file))


def _make(file: Path, compile: Compile) -> None:
    """The library with its digest behind it, which the loader passes over."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        compile(made)
        digest = _DIGEST(made.read_bytes()).digest()
        with made.open("ab") as out:
            out.write(digest)
        made.replace(file)  # at once, so that no other process sees half a file


def _is_whole(file: Path) -> bool:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return False
    return _DIGEST(data[:-_DIGEST_SIZE]).digest() == data[-_DIGEST_SIZE:]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other thread or process holds the lock, which ends with its holder."""
    import fcntl  # not on Windows, where the kernels are not compiled

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
