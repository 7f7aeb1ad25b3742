"""A library is compiled once, whatever happens to its file or its folder."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dinfer.native import library_cache
from dinfer.native.library_cache import CompileError, load_or_compile

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="needs Linux and a C compiler"
)


class Compiler:
    """Compiles `int answer() { return 42; }` and counts how often."""

    def __init__(self, seconds: float = 0) -> None:
        self.runs, self._seconds = 0, seconds

    def __call__(self, out: Path) -> None:
        self.runs += 1
        time.sleep(self._seconds)
        source = out.with_suffix(".c")
        source.write_text("int answer(void) { return 42; }\n")
        subprocess.run([str(COMPILER), "-shared", "-fPIC", source, "-o", out], check=True)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dinfer"


def works(library: ctypes.CDLL) -> bool:
    return library.answer() == 42


def test_a_second_call_finds_it(folder: Path) -> None:
    compiler = Compiler()
    assert all(works(load_or_compile("a", compiler)) for _ in range(2))
    assert compiler.runs == 1
    assert works(load_or_compile("b", compiler)) and compiler.runs == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "one bit", "text"])
def test_a_damaged_file_is_made_again(folder: Path, damage: str) -> None:
    """In a process of its own each time: a library that is mapped already is not read again."""
    compiler = Compiler()
    load_or_compile(damage, compiler)
    file = folder / f"{damage}.so"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    wrong = {"cut": whole[:-100], "empty": b"", "one bit": bytes(flipped), "text": b"no library"}
    file.unlink()  # what is mapped must not change
    file.write_bytes(wrong[damage])
    assert works(load_or_compile(damage, compiler)) and compiler.runs == 2
    assert file.read_bytes()[:4] == b"\x7fELF" and len(file.read_bytes()) == len(whole)


def test_many_at_once_compile_once(folder: Path) -> None:
    compiler = Compiler(seconds=0.2)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: load_or_compile("c", compiler), range(8)))
    assert all(map(works, found)) and compiler.runs == 1


def test_processes_at_once_compile_once(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = f"""
import subprocess, time
from dinfer.native.library_cache import load_or_compile

def compile(out):
    with open({str(log)!r}, "a") as file:
        file.write("compiled\\n")
    time.sleep(0.5)
    source = out.with_suffix(".c")
    source.write_text("int answer(void) {{ return 42; }}")
    subprocess.run([{COMPILER!r}, "-shared", "-fPIC", source, "-o", out], check=True)

assert load_or_compile("d", compile).answer() == 42
"""
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert log.read_text() == "compiled\n"


@pytest.mark.parametrize("kind", ["a file", "no home"])
def test_a_folder_that_cannot_be_used(
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if kind == "a file":
        blocked = tmp_path / "cache"
        blocked.write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

        def home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(library_cache.Path, "home", home)
    compiler = Compiler()
    with caplog.at_level(logging.WARNING, "dinfer"):
        assert works(load_or_compile("e", compiler))
    (record,) = caplog.records
    assert "every process compiles them anew" in record.getMessage() and compiler.runs == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_read_only(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    folder.chmod(0o500)
    with caplog.at_level(logging.WARNING, "dinfer"):
        assert works(load_or_compile("f", Compiler()))
    assert len(caplog.records) == 1


def test_what_the_compiler_says_is_passed_on(folder: Path) -> None:
    def refuses(out: Path) -> None:
        raise CompileError("no such option")

    with pytest.raises(CompileError, match="no such option"):
        load_or_compile("g", refuses)
    assert not list(folder.glob("*.so"))
    assert works(load_or_compile("g", Compiler()))
