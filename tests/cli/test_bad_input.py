"""Bad input: one clear sentence on standard error, exit code 2, and nothing else lost."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dinfer import LLM, SamplingParams
from dinfer.errors import RequestError
from dinfer.loader import load as loading
from dinfer.request import CanvasEvent

from .test_commands import GOLDEN, models, run, with_tokenizer

__all__ = ["models", "run"]  # fixtures
MASK = 311


@pytest.fixture
def refused(run: Callable) -> Callable[..., str]:
    """Runs a command that must be refused; what it said, in one line."""

    def call(*words: str, stdin: str = "") -> str:
        code, out, err = run(*words, stdin=stdin)
        assert (code, out) == (2, "")
        assert "Traceback" not in err
        assert err.startswith("Error: ") and err.endswith(".\n") and err.count("\n") == 1
        return err.removesuffix("\n")

    return call


@pytest.fixture(scope="module")
def llada(models: dict[str, str]) -> LLM:
    return LLM(models["llada"], "float32", "cpu", kv_memory=0.01)


@pytest.fixture
def serving(llada: LLM) -> Any:
    """The engine; whatever the test did, it must be empty afterwards and serve the next call."""
    yield llada
    assert llada.engine.pool.free == llada.engine.pool.pages
    assert not llada.engine.busy
    assert len(llada.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))) == 1


# Names and options


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        *(
            ("--kv-memory", x, "must be a positive number of GiB")
            for x in ("-1", "0", "nan", "inf")
        ),
        *(("--gpu-memory-utilization", x, "must be in (0, 1]") for x in ("0", "1.5", "nan")),
    ],
)
def test_memory(refused: Callable, option: str, value: str, allowed: str) -> None:
    assert allowed in refused("generate", "a", option, value)


@pytest.mark.parametrize(
    ("option", "given", "wrong", "near", "others"),
    [
        ("--decoder", "treshold", "treshold", "threshold", ["fixed", "factor"]),
        ("--cache", "vicinty:left=3", "vicinty", "vicinity", ["none", "dual", "prefix"]),
        ("--iteration", "blokwise", "blokwise", "blockwise", ["sliding"]),
        ("--decoder", "threshold:treshold=0.5", "treshold", "threshold", ["strict", "steps"]),
        ("--cache", "vicinity:lefft=3", "lefft", "left", ["right"]),
        ("--iteration", "blockwise:lenght=8", "lenght", "length", ["aligned"]),
    ],
)
def test_unknown_strategy_or_option(
    option: str,
    given: str,
    wrong: str,
    near: str,
    others: list[str],
    models: dict[str, str],
    refused: Callable,
) -> None:
    said = refused("generate", "abc", "-m", models["llada"], option, given)
    assert repr(wrong) in said
    assert f"Did you mean {near!r}?" in said
    assert all(name in said.partition("Allowed")[2] for name in others)


@pytest.mark.parametrize(
    ("option", "given", "needed"),
    [
        ("--decoder", "threshold:threshold=abc", ["'threshold'", "'abc'", "float"]),
        ("--decoder", "threshold:strict=maybe", ["'strict'", "'maybe'", "bool"]),
        ("--decoder", "threshold:threshold=1.5", ["1.5", "between 0 and 1"]),
        ("--decoder", "threshold:threshold", ["'threshold'", "option=value"]),
        ("--iteration", "blockwise:length=2.5", ["'length'", "'2.5'", "int"]),
        ("--iteration", "blockwise:length=-1", ["length", "-1", "0 or more"]),
        ("--cache", "block", ["'block'", "block-causal", "none, prefix, dual or vicinity"]),
    ],
)
def test_wrong_value_of_a_strategy(
    option: str, given: str, needed: list[str], models: dict[str, str], refused: Callable
) -> None:
    said = refused("generate", "abc", "-m", models["llada"], option, given)
    assert all(word in said for word in needed)


@pytest.mark.parametrize("command", [("generate", "abc", "-m"), ("info",), ("chat", "-m")])
def test_unknown_model(
    command: tuple[str, ...], refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "bundled", lambda: ["tiny-llada", "tiny-sdar"])
    said = refused(*command, "tiny-sdra")
    assert "Unknown model 'tiny-sdra'" in said
    assert "Did you mean 'tiny-sdar'? Allowed: tiny-llada, tiny-sdar." in said


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("generate", "a", "--max-token", "3"), ["--max-token", "--max-tokens"]),
        (("generate", "a", "--max-tokens", "abc"), ["'--max-tokens'", "'abc'", "valid integer"]),
        (("generate", "a", "--max-tokens=abc"), ["'--max-tokens'", "'abc'", "valid integer"]),
        (("generate", "a", "--temperature", "warm"), ["'--temperature'", "'warm'", "valid"]),
        (("generate", "a", "-n", "2.5"), ["'-n'", "'2.5'", "valid integer"]),
        (("generate", "a", "--seed"), ["--seed", "argument"]),
        (("generate",), ["argument"]),
        (("generate", "a", "b"), ["b", "argument"]),
        (("generat", "a"), ["'generat'", "'generate'"]),
        (("eval", "--num", "0"), ["'--num'", "1"]),
    ],
)
def test_wrong_command_line(words: tuple[str, ...], needed: list[str], refused: Callable) -> None:
    said = refused(*words)
    assert all(word in said for word in [*needed, "--help"])


@pytest.mark.parametrize(
    ("option", "given", "allowed"),
    [
        ("--max-tokens", "0", "1 or more"),
        ("--max-tokens", "-3", "1 or more"),
        ("--temperature", "-0.5", "0 or more"),
        ("--temperature", "nan", "0 or more and finite"),
        ("--temperature", "inf", "0 or more and finite"),
        ("--temperature", "1e39", "0 or more and finite"),
        ("--top-p", "0", "above 0 and at most 1"),
        ("--top-p", "1.5", "above 0 and at most 1"),
        ("--top-p", "nan", "above 0 and at most 1"),
        ("--top-k", "-1", "0 or more"),
        ("--top-k", "99999999999999999999", "at most 2147483647"),
        ("--seed", "-1", "0 or more"),
        ("-n", "0", "1 or more"),
        ("--stop", "", "non-empty"),
        ("--dtype", "float23", "float32"),
        ("--device", "tpu", "auto, cpu, cuda"),
    ],
)
def test_value_out_of_range(
    option: str, given: str, allowed: str, models: dict[str, str], refused: Callable
) -> None:
    said = refused("generate", "abc", "-m", models["llada"], option, given)
    name = option.strip("-").replace("-", "_")
    shown = {"1e39": "1e+39"}.get(given, given)
    assert name in said and shown in said and allowed in said


@pytest.mark.parametrize(
    ("fact", "needed"),
    [
        ("block_length", ["'block_length'", "name=value"]),
        ("block_lenght=8", ["'block_lenght'", "Did you mean 'block_length'", "mask_id"]),
        ("block_length=abc", ["'block_length'", "'abc'", "whole number"]),
        ("block_length=0", ["'block_length'", "0", "1 or more"]),
        ("eos_ids=[1,[2]]", ["'eos_ids'", "[1, [2]]", "list of token ids"]),
        ("mask_id=999", ["999", "320"]),
        ("decoder=treshold", ["Did you mean 'threshold'"]),
    ],
)
def test_wrong_fact(
    fact: str, needed: list[str], models: dict[str, str], refused: Callable
) -> None:
    said = refused("generate", "abc", "-m", models["sdar"], "--fact", fact)
    assert all(word in said for word in needed)


def test_wrong_names_elsewhere(refused: Callable, tmp_path: Path) -> None:
    said = refused("train", "tiny-sdra", "--out", str(tmp_path / "run"))
    assert "Did you mean 'tiny-sdar'?" in said
    assert not (tmp_path / "run").exists()
    said = refused("eval", "--task", "maths")
    assert "Unknown task 'maths'. Did you mean 'math'? Allowed: math, brief, words, tables." in said
    said = refused("eval", "--split", "tset")
    assert "Unknown split 'tset'. Did you mean 'test'? Allowed: train, dev, test." in said


# Checkpoints: more of them in test_load.


@pytest.mark.parametrize(
    "command", [("generate", "abc", "-m"), ("chat", "-m"), ("serve",), ("info",), ("quantize",)]
)
def test_wrong_family(
    command: tuple[str, ...], models: dict[str, str], refused: Callable, tmp_path: Path
) -> None:
    """A name that there is not, and that of a family whose checkpoint this is not."""
    words = (*command, models["sdar"], *[str(tmp_path / "new")] * (command == ("quantize",)))
    assert "Did you mean 'sdar'? Allowed: " in refused(*words, "--family", "sdra")
    said = refused(*words, "--family", "stable_diffcoder")
    assert "'sdar'" in said and "unexpected: model.layers.0.self_attn.k_norm.weight" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("generate", "abc", "-m"), ("info",)])
def test_damaged_checkpoint(command: tuple[str, ...], refused: Callable, tmp_path: Path) -> None:
    assert "no checkpoint: it holds no config.json" in refused(*command, str(tmp_path))
    folder = with_tokenizer("llada", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(*command, str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    said = refused(*command, str(folder))
    assert "'GPT2LMHeadModel'" in said and "LLaDAModelLM, SDARForCausalLM" in said


def test_truncated_weights(refused: Callable, tmp_path: Path) -> None:
    folder = with_tokenizer("llada", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    assert "model.safetensors" in refused("generate", "abc", "-m", str(folder))


def test_a_process_of_its_own(tmp_path: Path) -> None:
    given = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "dinfer", "info", str(tmp_path)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
    expected = f"Error: {tmp_path} is no checkpoint: it holds no config.json.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


# Prompts


def test_longer_than_the_context(models: dict[str, str], refused: Callable) -> None:
    said = refused("generate", "a" * 600, "-m", models["llada"], "--max-tokens", "8")
    assert "600 tokens" in said and "8 are to be generated" in said and "is 512" in said
    for huge in ("510", "999999999999"):  # refused before a canvas of that length is made
        said = refused("generate", "abc", "-m", models["llada"], "--max-tokens", huge)
        assert huge in said and "is 512" in said
    said = refused("infill", "a[BLANK:999999999]b", "-m", models["llada"])
    assert "999999999" in said and "is 512" in said


def test_exactly_the_context(serving: LLM) -> None:
    (out,) = serving.generate([[5] * 500], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(out.token_ids) == 12


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_empty_prompt(family: str, models: dict[str, str], run: Callable) -> None:
    code, out, _ = run("generate", "", "-m", models[family], "--max-tokens", "5", "--json")
    assert code == 0
    assert json.loads(out)["usage"]["prompt_tokens"] == 0
    llm = LLM(models[family], "float32", "cpu", kv_memory=0.01)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    (text,), (ids,) = llm.generate("", params), llm.generate([[]], params)
    assert text.token_ids == ids.token_ids and len(ids.token_ids) == 5
    assert llm.generate([]) == []  # no prompt at all
    assert llm.engine.pool.free == llm.engine.pool.pages


@pytest.mark.parametrize("wrong", [-1, 320, 2**70])
def test_token_id_out_of_range(wrong: int, serving: LLM) -> None:
    with pytest.raises(RequestError, match=rf"Token id {wrong} .* from 0 to 319\."):
        serving.generate([[1, 2], [3, wrong]])
    with pytest.raises(RequestError, match=f"Token id {wrong} "):
        serving.generate([[1]], suffix=[wrong])


@pytest.mark.parametrize("wrong", [[[1, 2.5]], [["a"]], [[True]], [None], [7.5], [{1: 2}]])
def test_no_prompt_at_all(wrong: Any, serving: LLM) -> None:
    with pytest.raises(RequestError, match="string or a list of whole numbers"):
        serving.generate(wrong)


def test_a_refused_request_takes_the_others_back(serving: LLM) -> None:
    long = SamplingParams(max_tokens=511)
    with pytest.raises(RequestError, match="context"):
        serving.generate([[1], [1, 2], [3]], [SamplingParams(), long, SamplingParams()])
    with pytest.raises(RequestError, match="'block'"):
        serving.generate([[1], [2]], [SamplingParams(), SamplingParams(cache="block")])
    with pytest.raises(RequestError, match=r"2 SamplingParams .* 1 prompts"):
        serving.generate([[1]], [SamplingParams()] * 2)
    with pytest.raises(RequestError, match="context"):
        next(serving.stream([1], SamplingParams(max_tokens=512)))


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_mask_id_in_a_prompt_is_a_token_like_others(family: str) -> None:
    llm = LLM(str(GOLDEN / family), "float32", "cpu", kv_memory=0.01)
    prompt = [5, MASK, 7, MASK, 9, 10]
    seen: list[CanvasEvent] = []

    def note(event: object) -> None:
        if isinstance(event, CanvasEvent):
            seen.append(event)

    params = SamplingParams(max_tokens=2, ignore_eos=True, decoder="fixed:steps=1", cache="none")
    (out,) = llm.generate(prompt, params, on_event=note)
    logits = llm.logits([*prompt, MASK, MASK])[6:].clone()
    logits[:, MASK] = -float("inf")
    assert out.token_ids == logits.argmax(dim=1).tolist()
    assert [event.positions for event in seen] == [[0, 1]]
    assert (out.usage.prompt_tokens, out.stats.tokens) == (6, 2)


def test_text_of_a_special_token_is_text(serving: LLM) -> None:
    ids = serving.prompts.ids("a<|mask|><|im_end|>")
    assert len(ids) == 19 and max(ids) < 256


@pytest.mark.parametrize(
    "text", ["no hole", "", "[BLANK:0]", "a[BLANK]", "[BLANK:-2]", "[BLANK:x]"]
)
def test_infill_without_a_hole(text: str, models: dict[str, str], refused: Callable) -> None:
    said = refused("infill", text, "-m", models["llada"])
    assert "[BLANK:n]" in said and "1 or more" in said


def test_infill_with_end_of_text_ids_beyond_the_model(models: dict[str, str]) -> None:
    llm = LLM(models["llada"], "float32", "cpu", {"eos_ids": [305, 9999]}, kv_memory=0.01)
    assert len(llm.infill("a[BLANK:2]").token_ids) == 3


def test_no_tokenizer(refused: Callable) -> None:
    model = str(GOLDEN / "llada")
    assert "no tokenizer; give token ids" in refused("generate", "abc", "-m", model)
    assert "no tokenizer; give token ids" in refused("infill", "a[BLANK:1]", "-m", model)
    llm = LLM(model, "float32", "cpu", kv_memory=0.01)
    (out,) = llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert (out.text, len(out.token_ids)) == ("", 3)
    with pytest.raises(RequestError, match="no tokenizer, so stop strings"):
        llm.generate([1, 2], SamplingParams(stop="."))


def test_no_chat_template(refused: Callable, tmp_path: Path) -> None:
    folder = with_tokenizer("llada", tmp_path)
    (folder / "tokenizer_config.json").unlink()
    said = refused("chat", "-m", str(folder), stdin="hello\n")
    assert "no chat template; use generate" in said


def test_standard_input_that_is_no_text(
    models: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable,
) -> None:
    broken = io.TextIOWrapper(io.BytesIO(b"ab\xffcd"), encoding="utf-8")
    monkeypatch.setattr(io, "StringIO", lambda _: broken)
    said = refused("generate", "-", "-m", models["llada"])
    assert "utf-8" in said and "byte 2" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", True),
        ("top_p", "x"),
        ("stop", 5),
        ("stop", ["a", 3]),
        ("decoder", 3),
        ("cache", ["none"]),
    ],
)
def test_parameter_of_a_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"^{name} is .* must "):
        SamplingParams(**{name: value})


def test_stop_may_be_left_out() -> None:
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
