"""The kernels are compiled once, and where they cannot be, everything works without."""

import logging
from functools import cache
from pathlib import Path

import pytest

from dinfer import LLM
from dinfer.errors import RequestError
from dinfer.native import build
from dinfer.runner.native_cpu import NativeRunner

needs = pytest.mark.usefixtures("native")


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and nothing known of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("able", "_library"):
        monkeypatch.setattr(build, name, cache(getattr(build, name).__wrapped__))
    return tmp_path


@needs
def test_compiled_once(afresh: Path) -> None:
    assert build.able()
    (made,) = (afresh / "dinfer").glob("*.so")
    before = made.stat().st_mtime_ns
    build._library.cache_clear()
    assert build.library().form() in (0, 1, 2)
    assert made.stat().st_mtime_ns == before


@needs
def test_a_compiler_that_is_missing_or_fails(
    afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says why, and models run without."""
    compiler = afresh / "c++"
    monkeypatch.setenv("CXX", f"{compiler} -pipe")
    for script, why in (
        (None, f"CXX is '{compiler} -pipe', which is no command here"),
        ('#!/bin/sh\necho "no such option: $1" >&2; exit 1\n', "no such option: -pipe"),
        ("#!/bin/sh\nexit 3\n", f"{compiler} ended with exit status 3"),
    ):
        if script is not None:
            compiler.write_text(script)
            compiler.chmod(0o755)
        build.able.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dinfer"):
            assert not build.able()
        (record,) = caplog.records
        assert record.getMessage().endswith(why)
    llm = LLM("tiny-llada", device="cpu")
    assert not isinstance(llm.engine.runner.dense, NativeRunner)


@needs
def test_no_compiler_at_all(
    afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(afresh))
    with caplog.at_level(logging.WARNING, "dinfer"):
        assert not build.able()
    (record,) = caplog.records
    assert "no C++ compiler; install g++ or clang++" in record.getMessage()


@needs
def test_who_uses_them() -> None:
    """Every family but Gemma's, in float32, bfloat16, int8 and int4, unless told not to."""
    for dtype, quant, compiled, used in (
        ("bfloat16", None, None, True),
        ("bfloat16", None, True, True),
        ("bfloat16", None, False, False),
        ("float32", "int8", None, True),
        ("bfloat16", "int4", None, True),
        ("bfloat16", "int4:group=32", None, False),
        ("float32", None, None, True),
        ("float16", None, None, False),
    ):
        llm = LLM("tiny-llada", dtype=dtype, device="cpu", quant=quant, compiled=compiled)
        assert isinstance(llm.engine.runner.dense, NativeRunner) == used
        assert used or llm.engine.runner.body is llm.loaded.model


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "supported", lambda: ("avx2", "avx512"))
    for asked, found in (("", "avx512"), ("avx2", "avx2"), ("off", None)):
        monkeypatch.setenv(build.CHOICE, asked)
        assert build.chosen() == found
    for asked in ("amx", "AVX2", "none"):
        monkeypatch.setenv(build.CHOICE, asked)
        with pytest.raises(RequestError, match=f"{asked}.*off, avx2, avx512"):
            build.chosen()
