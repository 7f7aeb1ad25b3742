"""The commands, run in process on tiny random checkpoints that are given a byte tokenizer."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from dinfer import LLM, SamplingParams
from dinfer.cli import main, options

GOLDEN = Path(__file__).parents[1] / "golden"
COMMANDS = [
    *("generate", "chat", "infill", "serve", "eval", "compare", "tune", "train", "quantize"),
    *("batch", "list", "info"),
]
SPECIAL = {"<|im_end|>": 305, "<|im_start|>": 306, "<|mask|>": 311}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}
STATS = {
    "forward_passes",
    "rows_run",
    "reused",
    "tokens",
    "seconds",
    "queued_seconds",
    "repetition",
    "tokens_per_forward",
}
OUTPUT = {
    *("id", "text", "token_ids", "finish_reason", "usage", "stats", "logprobs", "top_logprobs"),
    "holes",
}


def with_tokenizer(family: str, parent: Path) -> Path:
    """A copy of a golden checkpoint with a token for each byte and the special ones of ChatML."""
    made = parent / family
    shutil.copytree(GOLDEN / family, made, ignore=shutil.ignore_patterns("cases*", "outputs*"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    document = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True, **flags} for name, i in SPECIAL.items()
        ],
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": False},
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {letter: i for i, letter in enumerate(letters)} | SPECIAL,
            "merges": [],
        },
    }
    (made / "tokenizer.json").write_text(json.dumps(document))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    parent = tmp_path_factory.mktemp("models")
    return {family: str(with_tokenizer(family, parent)) for family in ("llada", "sdar")}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: exit code, standard output, standard error."""

    def call(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dinfer", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def parsed(run: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Runs a command that succeeds, with --json; what it prints, which is JSON alone."""

    def call(*words: str, stdin: str = "") -> Any:
        code, out, err = run(*words, "--json", stdin=stdin)
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, run: Callable) -> None:
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert f"Example: dinfer {command}" in " ".join(out.split())


def test_help_names_every_command(run: Callable) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_no_command_shows_the_help(run: Callable) -> None:
    code, out, err = run()
    assert code == 2
    assert "generate" in out + err


def test_list(run: Callable, parsed: Callable) -> None:
    found = parsed("list")
    assert set(found) == {"model", "family", "decoder", "cache", "iteration", "quant"}
    assert {"llada", "sdar"} <= set(found["family"])
    assert {"none", "prefix", "dual", "vicinity", "block"} <= set(found["cache"])
    assert {"fixed", "threshold"} <= set(found["decoder"])
    assert {"blockwise", "sliding"} <= set(found["iteration"])
    code, out, _ = run("list")
    assert code == 0 and "vicinity" in out


def test_info(models: dict[str, str], run: Callable, parsed: Callable) -> None:
    found = parsed("info", models["llada"])
    keys = {
        "model", "family", "parameters", "vocab", "hidden", "layers", "heads", "kv_heads",
        "head_size", "intermediate", "context", "mask_id", "eos_ids", "block_length", "attention",
        "iteration", "cache", "decoder", "weights_mib", "request_mib_at_full_context",
    }  # fmt: skip
    assert keys <= set(found)
    # 2 embeddings, and in each of 3 layers 4 square matrices, 3 of the MLP, 2 norms; a last norm.
    assert found["parameters"] == 2 * 320 * 64 + 3 * (4 * 64**2 + 3 * 64 * 160 + 2 * 64) + 64
    # Keys and values of 512 positions in 3 layers of 64 numbers, 4 bytes each.
    assert found["request_mib_at_full_context"]["float32"] == 2 * 512 * 3 * 64 * 4 / 2**20
    assert (found["family"], found["attention"], found["mask_id"]) == ("llada", "full", 311)
    assert (found["eos_ids"], found["block_length"], found["context"]) == ([305], None, 512)
    sdar = parsed("info", models["sdar"], "--fact", "block_length=8")
    assert (sdar["attention"], sdar["block_length"]) == ("block-causal", 8)
    assert "length=8" in sdar["iteration"]
    code, out, _ = run("info", models["llada"])
    assert code == 0 and "311" in out


def test_info_of_experts_and_of_fewer_bits(parsed: Callable) -> None:
    found = parsed("info", str(GOLDEN / "llada2_moe"))
    # Layers 1 and 2 have 16 experts of 3 matrices, of which a row runs through 4.
    expert = 3 * 64 * 16
    assert found["parameters"] - found["active_parameters"] == 2 * 12 * expert
    assert found["mixture"]["routing"]["groups"] == 4
    memory = found["weights_mib"]
    assert memory["int8"] < memory["bfloat16"] < memory["float32"]


def test_the_family_of_an_unknown_architecture(
    parsed: Callable, run: Callable, tmp_path: Path
) -> None:
    folder = with_tokenizer("sdar", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Mine"]}))
    given = (str(folder), "--family", "sdar")
    assert parsed("info", *given) == parsed("info", str(GOLDEN / "sdar")) | {"model": str(folder)}
    found = parsed("generate", "abc", "--dtype", "float32", "-m", *given)
    assert run("info", str(folder))[0] == 2
    (folder / "config.json").write_text(json.dumps(config))
    (out,) = LLM(str(folder), "float32", "cpu", kv_memory=0.01).generate("abc")
    assert found["token_ids"] == out.token_ids


def test_the_rate_of_reading(
    models: dict[str, str], run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("generate", "abc", "-m", models["sdar"], "--max-tokens", "2")
    assert "weights" not in run(*words)[2]
    monkeypatch.setattr(options, "LARGE", 0)
    code, _, said = run(*words)
    # In the order in which it happens; a narrow terminal folds lines.
    rate = r"weights read in \d+\.\d s \(\d+\.\d+ MB/s\) .* forwards"
    assert code == 0 and re.search(rate, " ".join(said.split()))


def test_quantize(models: dict[str, str], parsed: Callable, run: Callable, tmp_path: Path) -> None:
    found = parsed("quantize", models["sdar"], str(tmp_path / "a"))
    assert set(found) == {"folder", "scheme", "bytes", "seconds"}
    assert found["bytes"] == (tmp_path / "a" / "model.safetensors").stat().st_size
    (out,) = LLM(str(tmp_path / "a"), "float32", "cpu", kv_memory=0.01).generate("abc")
    assert (
        out.text
        == LLM(models["sdar"], "float32", "cpu", kv_memory=0.01, quant="int8")
        .generate("abc")[0]
        .text
    )
    code, out, err = run("quantize", models["sdar"], str(tmp_path / "a"))
    assert (code, out) == (2, "") and "no empty folder" in err
    code, out, err = run("quantize", models["sdar"], str(tmp_path / "b"), "--scheme", "int3")
    assert (code, out) == (2, "") and "int8" in err and not (tmp_path / "b").exists()


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_generate(family: str, models: dict[str, str], parsed: Callable) -> None:
    found = parsed(
        "generate", "abc", "-m", models[family], "--max-tokens", "9", "--dtype", "float32"
    )
    assert set(found) == OUTPUT
    assert set(found["usage"]) == USAGE and set(found["stats"]) == STATS
    assert found["usage"]["prompt_tokens"] == 3
    assert found["usage"]["completion_tokens"] == len(found["token_ids"]) <= 9
    assert found["usage"]["total_tokens"] == 3 + len(found["token_ids"])
    assert found["finish_reason"] == ("stop" if len(found["token_ids"]) < 9 else "length")
    assert 1 <= found["stats"]["forward_passes"] <= 9
    llm = LLM(models[family], "float32", "cpu", kv_memory=0.01)
    (same,) = llm.generate("abc", SamplingParams(max_tokens=9))
    assert (found["token_ids"], found["text"]) == (same.token_ids, same.text)
    assert found["text"] == llm.tokenizer.decode(found["token_ids"])


def test_generate_for_people(models: dict[str, str], run: Callable, parsed: Callable) -> None:
    words = ("generate", "abc", "-m", models["llada"], "--max-tokens", "12")
    code, out, err = run(*words)
    text = parsed(*words)["text"]
    assert (code, out) == (0, text + "\n")
    assert "tokens" in err and "forwards" in err
    code, out, _ = run(*words, "--watch")
    assert code == 0 and out.endswith(text + "\n")


def test_generate_reads_standard_input(models: dict[str, str], parsed: Callable) -> None:
    words = ("-m", models["llada"], "--max-tokens", "4")
    assert (
        parsed("generate", "-", *words, stdin="abcd")["token_ids"]
        == parsed("generate", "abcd", *words)["token_ids"]
    )


def test_several_answers(models: dict[str, str], run: Callable, parsed: Callable) -> None:
    words = ("generate", "abc", "-m", models["llada"], "--max-tokens", "8", "--temperature", "1")
    found = parsed(*words, "-n", "3")
    assert len(found) == 3 and all(set(one) == OUTPUT for one in found)
    assert len({tuple(one["token_ids"]) for one in found}) == 3
    assert found[0]["token_ids"] == parsed(*words)["token_ids"]  # the first keeps the seed
    code, out, err = run(*words, "-n", "3")
    assert code == 0 and err.count("forwards") == 3
    assert out == "".join(one["text"] + "\n" for one in found)


def test_a_seed_repeats(models: dict[str, str], parsed: Callable) -> None:
    words = ("generate", "abc", "-m", models["sdar"], "--max-tokens", "8", "--temperature", "1")

    def ids(seed: int) -> list[int]:
        return parsed(*words, "--seed", str(seed))["token_ids"]

    first = ids(5)
    assert ids(5) == first
    assert ids(6) != first


def test_stop_strings(models: dict[str, str], parsed: Callable) -> None:
    words = ("generate", "abc", "-m", models["llada"], "--max-tokens", "40", "--dtype", "float32")
    whole = parsed(*words)["text"]
    stop = next(c for c in whole[3:] if c != "\ufffd")
    found = parsed(*words, "--stop", "never there", "--stop", stop)
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"


def test_suffix(models: dict[str, str], parsed: Callable) -> None:
    words = ("generate", "abc", "-m", models["llada"], "--max-tokens", "6", "--suffix", "xyz")
    found = parsed(*words)
    ids = found["token_ids"]
    assert len(ids) == 9 and found["text"].endswith("xyz")
    assert not set(ids) & set(SPECIAL.values())


def test_infill(models: dict[str, str], run: Callable, parsed: Callable) -> None:
    text = "ab[BLANK:3]c\0d[BLANK:2]."
    found = parsed("infill", text, "-m", models["llada"], "--prompt", "q: ")
    assert set(found) == OUTPUT
    first, second = found["holes"]
    assert found["text"] == f"ab{first}c\0d{second}."
    assert len(found["token_ids"]) == 2 + 3 + 3 + 2 + 1
    assert found["usage"]["prompt_tokens"] == 3
    assert not set(found["token_ids"]) & set(SPECIAL.values())
    code, out, err = run("infill", "ab[BLANK:3]", "-m", models["llada"])
    assert code == 0 and out.startswith("ab") and "forwards" in err


def test_chat(models: dict[str, str], run: Callable) -> None:
    words = (
        "chat",
        "-m",
        models["llada"],
        "--max-tokens",
        "6",
        "--system",
        "s",
        "--dtype",
        "float32",
    )
    code, out, err = run(*words, stdin="hi\nyou\n\nnever\n")
    assert (code, err) == (0, "")
    llm = LLM(models["llada"], "float32", "cpu", kv_memory=0.01)
    messages, answers = [{"role": "system", "content": "s"}], ""
    for line in ("hi", "you"):
        messages.append({"role": "user", "content": line})
        (answer,) = llm.chat(messages, SamplingParams(max_tokens=6))
        messages.append({"role": "assistant", "content": answer.text})
        answers += answer.text + "\n"
    assert out == answers
