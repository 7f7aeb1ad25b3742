"""Checkpoints: what a folder must hold, how it is read, and what is said where it is damaged."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from dinfer import LLM
from dinfer.errors import CheckpointError, DinferError, RequestError, UnknownName
from dinfer.loader import load as loading
from dinfer.loader import weights as weights_of
from dinfer.loader.load import blank, family_of, load, unused
from dinfer.loader.quantize import quantize
from dinfer.loader.safetensors import SafetensorsFiles
from dinfer.loader.weights import check, places

from ..conftest import FAMILIES, GOLDEN, golden_facts

IDS = [7, 100, 311, 42, 9, 311, 250, 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny LLaDA checkpoint that a test may damage."""
    return copy_of("llada", tmp_path)


def copy_of(family: str, parent: Path) -> Path:
    made = parent / family
    made.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / family / file, made / file)
    return made


def change(folder: Path, file: str = "config.json", **values: Any) -> None:
    path = folder / file
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(old | values))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def llm(folder: Path, dtype: str = "float32", **facts: Any) -> LLM:
    return LLM(str(folder), dtype=dtype, device="cpu", facts=facts, kv_memory=0.01)


def refusal(folder: Path, kind: type[DinferError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        load(str(folder), "float32", "cpu")
    said = str(caught.value)
    assert said.endswith(".") and "Traceback" not in said
    return said


# What loads


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_two_shards_are_the_single_file(family: str, tmp_path: Path) -> None:
    folder = copy_of(family, tmp_path)
    tensors = weights(folder)
    names = sorted(tensors)
    table = {}
    for part, chosen in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        table |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors").unlink()
    change(folder, "model.safetensors.index.json", weight_map=table)
    assert torch.equal(llm(folder).logits(IDS), llm(GOLDEN / family).logits(IDS))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.0125)])
@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_half_precision_is_near(family: str, dtype: str, tolerance: float) -> None:
    small = llm(GOLDEN / family, dtype)
    assert {p.dtype for p in small.loaded.model.parameters()} == {getattr(torch, dtype)}
    exact, found = llm(GOLDEN / family).logits(IDS), small.logits(IDS).float()
    assert torch.linalg.norm(found - exact) < tolerance * torch.linalg.norm(exact)
    (out,) = small.generate([5, 6, 7])
    assert out.usage.completion_tokens <= 128 and 311 not in out.token_ids


def test_weights_stored_in_bfloat16(folder: Path) -> None:
    tensors = {name: x.bfloat16() for name, x in weights(folder).items()}
    save_file(tensors, folder / "model.safetensors")
    loaded = load(str(folder), "float32", "cpu")
    row = tensors["model.transformer.wte.weight"][17].float()
    assert torch.equal(loaded.model.embedding.weight[17], row)


def test_architectures_decides_not_model_type() -> None:
    dense = {"model_type": "llada", "architectures": ["LLaDAModelLM"]}
    assert family_of(dense).__name__ == "dinfer.model.llada"
    assert family_of(dense | {"model_type": "sdar"}).__name__ == "dinfer.model.llada"
    sdar = {"model_type": "llada", "architectures": ["SDARForCausalLM"]}
    assert family_of(sdar).__name__ == "dinfer.model.sdar"


def test_every_end_of_text_id_counts(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[301, 302])
    assert load(str(folder), "float32", "cpu").facts.eos_ids == {301, 302, 305}
    change(folder, "generation_config.json", eos_token_id=None)
    change(folder, eos_token_id=None)
    assert load(str(folder), "float32", "cpu").facts.eos_ids == set()


def test_the_end_of_a_turn_by_the_template_counts(folder: Path) -> None:
    """Neither config.json nor generation_config.json names it; what the caller says wins."""
    letters = {letter: id for id, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(BPE(vocab=letters | {"<|end|>": 305, "<|turn|>": 306}, merges=[]))
    made.add_special_tokens(["<|end|>", "<|turn|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|turn|>{% endfor %}"
    )
    assert load(str(folder), "float32", "cpu").facts.eos_ids == {305, 306}
    assert load(str(folder), "float32", "cpu", {"eos_ids": [4]}).facts.eos_ids == {4}


def test_facts_of_the_folder_and_then_of_the_caller(folder: Path) -> None:
    change(folder, "dinfer.json", decoder="fixed:steps=4", context=64)
    facts = load(str(folder), "float32", "cpu", {"context": 32}).facts
    assert (facts.decoder, facts.context, facts.mask_id) == ("fixed:steps=4", 32, 311)


def test_the_rate_of_reading_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "dinfer"):
        read = load(str(folder), "float32", "cpu").read
    assert read and read.bytes == sum(x.nbytes for x in weights(folder).values())
    assert read.rate == read.bytes / read.seconds and f"({read.rate / 1e6:.2f} MB/s)" in caplog.text


@pytest.mark.parametrize("shape", [(7,), (1,), (5, 4), (64, 3), (6, 2, 5), (1, 1)])
@pytest.mark.parametrize("limit", [1, 8, 1000])
def test_tensors_are_read_in_pieces(
    shape: tuple[int, ...], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row once, in order, and no piece larger than the limit or a row."""
    monkeypatch.setattr(weights_of, "AT_ONCE", limit)
    tensor = torch.randn(shape).bfloat16()
    save_file({"a": torch.ones(3), "b": tensor, "c": torch.ones(2)}, tmp_path / "model.safetensors")
    found = torch.full(shape, torch.nan)
    for rows, piece in SafetensorsFiles(tmp_path).pieces("b"):
        assert found[rows].isnan().all() and piece.dtype == torch.bfloat16
        assert piece.numel() <= max(limit, piece[0].numel() if piece.ndim > 1 else len(tensor))
        found[rows] = piece.float()
    assert torch.equal(found, tensor.float())


# What does not


def test_no_checkpoint(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is no checkpoint: it holds no config.json."


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    said = refusal(folder)
    assert "model.safetensors" in said and "model.safetensors.index.json" in said


@pytest.mark.parametrize("text", ["{", "", "[1]", "\xff"])
def test_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    said = refusal(folder)
    assert "config.json" in said and str(folder) in said and "JSON" in said


@pytest.mark.parametrize("given", [["LLaDAModel"], ["LlamaForCausalLM"], [], None, "x", {}, 3])
def test_unsupported_family(folder: Path, given: Any) -> None:
    change(folder, architectures=given)
    said = refusal(folder)
    assert "LLaDAModelLM" in said and "SDARForCausalLM" in said
    assert not given or not isinstance(given, list) or given[0] in said


def test_unsupported_setting_and_missing_key(folder: Path) -> None:
    change(folder, include_bias=True)
    said = refusal(folder)
    assert "'include_bias': True" in said and "only False" in said
    change(folder, include_bias=False, n_layers=None)
    assert "'n_layers'" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    said = refusal(folder)
    assert "model.safetensors" in said and "safetensors file" in said


def test_every_missing_and_unexpected_tensor_is_named(folder: Path) -> None:
    tensors = weights(folder)
    gone = ["model.transformer.ln_f.weight", "model.transformer.blocks.1.q_proj.weight"]
    for name in gone:
        del tensors[name]
    tensors |= {"extra.one": torch.zeros(1), "extra.two": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors")
    missing, unexpected = refusal(folder).split("unexpected")
    assert all(name in missing for name in gone)
    assert "extra.one" in unexpected and "extra.two" in unexpected
    assert "blocks.0" not in missing + unexpected


def test_wrong_shape_and_kind(folder: Path) -> None:
    tensors = weights(folder)
    name = "model.transformer.blocks.2.k_proj.weight"
    save_file(tensors | {name: torch.zeros(64, 32)}, folder / "model.safetensors")
    said = refusal(folder)
    assert name in said and "[64, 32]" in said and "[64, 64]" in said
    save_file(tensors | {name: torch.zeros(64, 64, dtype=torch.int8)}, folder / "model.safetensors")
    said = refusal(folder)
    assert name in said and "int8" in said


@pytest.mark.parametrize("family", FAMILIES)
def test_any_damaged_tensor_is_named(family: str) -> None:
    """Each tensor of each family in turn: deleted, renamed, of another shape, of another kind."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    module = family_of(config)
    shape = module.shape(config)
    slots = module.slots(shape)
    targets = places(blank(module, shape, torch.float32), slots)
    tensors = SafetensorsFiles(GOLDEN / family, unused(module))
    held = tensors.headers
    assert set(held) == set(slots)
    check(targets, tensors)
    for name, header in held.items():
        others = {other: held[other] for other in held if other != name}
        damaged = {
            f"missing: {name}.": others,
            f"missing: {name}; 1 unexpected: {name}.old": others | {f"{name}.old": header},
            f"{name} has the shape {[*header.shape, 1]}": others
            | {name: header._replace(shape=(*header.shape, 1))},
            f"{name} holds int8": others | {name: header._replace(dtype=torch.int8)},
        }
        for said, headers in damaged.items():
            tensors.headers = headers
            with pytest.raises(CheckpointError, match=re.escape(said)):
                check(targets, tensors)


def test_a_checkpoint_under_the_name_of_another_family(tmp_path: Path) -> None:
    folder = copy_of("dream", tmp_path)
    change(folder, architectures=["SDARForCausalLM"], block_size=4)
    said = refusal(folder)
    assert "model.layers.0.self_attn.q_norm.weight" in said.split("unexpected")[0]
    assert "model.layers.2.self_attn.v_proj.bias" in said.split("unexpected")[1]


@pytest.mark.parametrize("table", [None, [], {"a": 1}])
def test_index_without_a_map(folder: Path, table: Any) -> None:
    (folder / "model.safetensors").unlink()
    change(folder, "model.safetensors.index.json", weight_map=table)
    assert "weight_map" in refusal(folder)


def test_index_that_names_what_is_not_there(folder: Path) -> None:
    tensors = weights(folder)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    table = dict.fromkeys(tensors, "one.safetensors")
    first = min(table)
    change(folder, "model.safetensors.index.json", weight_map=table | {first: "gone.safetensors"})
    assert "1 of the 2 files" in (said := refusal(folder)) and "gone.safetensors; down" in said
    del tensors[first]
    save_file(tensors, folder / "one.safetensors")
    change(folder, "model.safetensors.index.json", weight_map=table)
    assert f"one.safetensors in {folder} does not hold {first}" in refusal(folder)


# What lies beside the weights, and other forms of them


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_a_complete_single_file_goes_before_an_index(family: str, tmp_path: Path) -> None:
    """As in transformers; such a pair is what a merge of shards leaves."""
    folder = copy_of(family, tmp_path)
    change(folder, "model.safetensors.index.json", weight_map={"a": "gone.safetensors"})
    assert torch.equal(llm(folder).logits(IDS), llm(GOLDEN / family).logits(IDS))


def test_shards_without_an_index_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert "it holds model-00001-of-00002.safetensors" in refusal(folder)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "sdar_moe"])  # that has shards
def test_buffers_are_passed_over(family: str, tmp_path: Path) -> None:
    folder, held = copy_of(family, tmp_path), weights(GOLDEN / family)
    buffers = ("inv_freq", "cos_cached", "sin_cached")
    extra = {f"model.layers.0.self_attn.rotary_emb.{name}": torch.ones(8) for name in buffers}
    extra |= {"model.position_ids": torch.arange(9)}
    save_file(held | extra, folder / "model.safetensors")
    facts = golden_facts(family)
    found, golden = (load(str(f), "float32", "cpu", facts) for f in (folder, GOLDEN / family))
    assert found.read and golden.read and found.read.bytes == golden.read.bytes


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize(
    ("family", "key", "head"),
    [
        ("llada", "weight_tying", "model.transformer.ff_out.weight"),
        ("dream", "tie_word_embeddings", "lm_head.weight"),
    ],
)
def test_a_head_beside_a_tied_embedding(
    family: str, key: str, head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same: passed over. Another one: it is the head, as transformers has it."""
    folder, held = copy_of(family, tmp_path), weights(GOLDEN / family)
    change(folder, **{key: True})
    embedding = next(name for name in held if "wte" in name or "embed_tokens" in name)
    save_file(held | {head: held[embedding].clone()}, folder / "model.safetensors")
    tied = load(str(folder), "float32", "cpu").model
    assert tied.shape.tied and tied.head.weight is tied.embedding.weight
    save_file({name: x for name, x in held.items() if name != head}, folder / "model.safetensors")
    assert load(str(folder), "float32", "cpu").model.shape.tied and not caplog.text
    save_file(held, folder / "model.safetensors")
    own = load(str(folder), "float32", "cpu").model
    assert not own.shape.tied and torch.equal(own.head.weight, held[head])
    assert f"{head} differs from {embedding}" in caplog.text


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_weights(shards: int, old: bool, tmp_path: Path) -> None:
    """As torch.save writes them now, and as it did before version 1.6."""
    folder = copy_of("llada", tmp_path)
    tensors = weights(folder)
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    table = {}
    for part in range(shards):
        file = f"pytorch_model-{part + 1:05}-of-00002.bin" if shards > 1 else "pytorch_model.bin"
        chosen = names[part::shards]
        new = {"_use_new_zipfile_serialization": not old}
        torch.save({name: tensors[name] for name in chosen}, folder / file, **new)
        table |= dict.fromkeys(chosen, file)
    if shards > 1:
        change(folder, "pytorch_model.bin.index.json", weight_map=table)
    assert torch.equal(llm(folder).logits(IDS), llm(GOLDEN / "llada").logits(IDS))
    written = list(quantize(str(folder), tmp_path / "int8", "int8"))
    assert len(written) == shards
    found = LLM(str(tmp_path / "int8"), dtype="float32", device="cpu", kv_memory=0.01)
    again = LLM(str(folder), dtype="float32", device="cpu", kv_memory=0.01, quant="int8")
    assert torch.equal(found.logits(IDS), again.logits(IDS))


class Trap:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickles_that_are_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    path, trap = folder / "pytorch_model.bin", folder / "opened"
    torch.save({"a": Trap(trap)}, path)
    assert "more than tensors" in refusal(folder) and not trap.exists()
    torch.save([torch.zeros(3)], path)
    assert "table of tensors" in refusal(folder)
    for content in (b"", b"PK\x03\x04", path.read_bytes()[:40]):
        path.write_bytes(content)
        assert str(path) in refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_pointers_of_git_lfs(file: str, folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / file).write_text(pointer)
    said = refusal(folder)
    assert f"{folder / file} is a Git LFS pointer" in said and "git lfs pull" in said
    if file == "model.safetensors":
        (folder / file).rename(folder / "pytorch_model.bin")
        assert "pytorch_model.bin is a Git LFS pointer" in refusal(folder)
        (folder / "a.gguf").write_text(pointer)
        assert "a.gguf is a Git LFS pointer" in refusal(folder / "a.gguf")


def test_byte_order_marks(folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (folder / "dinfer.json").write_bytes(b'\xef\xbb\xbf{"context": 99}')
    assert load(str(folder), "float32", "cpu").facts.context == 99


def test_mask_outside_the_embedding(folder: Path) -> None:
    change(folder, mask_token_id=320)
    said = refusal(folder, DinferError)
    assert "320" in said
    change(folder, mask_token_id="mask")
    assert "'mask'" in refusal(folder, DinferError)


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer" in refusal(folder)


# Facts, dtype, device, names


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("block_length", "abc", "whole number"),
        ("block_length", 0, "1 or more"),
        ("block_length", True, "whole number"),
        ("context", -5, "1 or more"),
        ("context", None, "whole number"),
        ("mask_id", 1.5, "token id"),
        ("eos_ids", 305, "list"),
        ("eos_ids", ["a"], "token ids"),
        ("eos_ids", [[1]], "token ids"),
        ("eos_ids", [-1], "token ids"),
        ("cache", 3, "spec string"),
        ("chat_only", 1, "true or false"),
    ],
)
def test_fact_of_a_wrong_type(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        load(str(GOLDEN / "sdar"), "float32", "cpu", {name: value})
    said = str(caught.value)
    assert repr(name) in said and repr(value) in said and allowed in said


def test_unknown_fact() -> None:
    with pytest.raises(RequestError, match=r"'block_lenght'.*Did you mean 'block_length'.*Allowed"):
        load(str(GOLDEN / "sdar"), "float32", "cpu", {"block_lenght": 8})


def test_dtype_and_device() -> None:
    model = str(GOLDEN / "llada")
    with pytest.raises(RequestError, match=r"'float23'.*'float32'.*bfloat16"):
        load(model, "float23", "cpu")
    for device in ("tpu", "meta", "mps", "cuda:x", ""):
        with pytest.raises(RequestError, match="auto, cpu, cuda"):
            load(model, "float32", device)
    count = torch.cuda.device_count()
    with pytest.raises(RequestError, match=f"cuda:{count}"):
        load(model, "float32", f"cuda:{count}")


@pytest.mark.parametrize("name", ["tiny-sdra", "a b/c d", "a--b/c", "x" * 300, "", "./none/here"])
def test_unknown_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "bundled", lambda: ["tiny-llada", "tiny-sdar"])
    with pytest.raises(UnknownName) as caught:
        load(name)
    said = str(caught.value)
    assert repr(name) in said and "tiny-llada, tiny-sdar" in said
    assert ("Did you mean 'tiny-sdar'?" in said) == (name == "tiny-sdra")


def test_hub_id_without_a_network(tmp_path: Path) -> None:
    # The hub's library reads the environment when it is imported: a process of its own.
    program = "from dinfer.cli import main; main()"
    given = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    given["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", program, "info", "GSAI-ML/LLaDA-8B-Instruct"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("Error: 'GSAI-ML/LLaDA-8B-Instruct'")
    assert "network" in said and "download" in said and "folder" in said
