"""GGUF files, written here as llama.cpp's converter writes them, against their folders."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import pre_tokenizers, trainers

from dinfer import LLM, SamplingParams
from dinfer.errors import CheckpointError, RequestError, UnknownName
from dinfer.loader import weights
from dinfer.loader.gguf import GGUF
from dinfer.loader.load import load
from dinfer.loader.quantize import quantize
from dinfer.model import llada
from dinfer.nn.transformer import ModelConfig
from dinfer.text.gguf import FRAMES
from dinfer.text.tokenizer import byte_level

from ..conftest import GOLDEN, golden_facts

IDS = [7, 100, 211, 42, 9, 311, 250, 3, 311, 311]
FORMS = {
    "llada": ("llada", "LLADA"),
    "llada_gqa": ("llada", "LLADA"),
    "llada_moe": ("llada-moe", "LLADA_MOE"),
    "dream": ("dream", "DREAM"),
}
"""Golden folder -> name of the architecture, and the package's constant for it."""


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Channels i and i + half of a head, which rotate together, side by side."""
    size = len(weight) // heads
    order = [h * size + i + half for h in range(heads) for i in range(size // 2)
             for half in (0, size // 2)]  # fmt: skip
    return weight[order]


def tensors_of(family: str, config: dict) -> dict[str, np.ndarray]:
    """The golden weights under the names of the package's own table."""
    held = load_file(GOLDEN / family / "model.safetensors")
    architecture = getattr(gguf.MODEL_ARCH, FORMS[family][1])
    layers = config.get("n_layers") or config["num_hidden_layers"]
    table = gguf.get_tensor_name_map(architecture, layers)
    found, experts = {}, {}
    for name, tensor in held.items():
        if architecture is gguf.MODEL_ARCH.LLADA:
            kv = config["n_kv_heads"] or config["n_heads"]
            heads = {"q_proj": config["n_heads"], "k_proj": kv}.get(name.split(".")[-2])
            tensor = interleave(tensor, heads) if heads else tensor
        if match := re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
            continue
        found[table.get_name(name, (".weight", ".bias"))] = tensor.float().numpy()
    for name, many in experts.items():
        stacked = torch.stack([many[i] for i in range(len(many))])
        found[table.get_name(name, (".weight",))] = stacked.float().numpy()
    return found


def write(family: str, path: Path, kind: Kind = Kind.F32, more: Callable | None = None) -> Path:
    """more: adds to the file, or changes its tensors in place."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    writer = gguf.GGUFWriter(path, FORMS[family][0])
    one = lambda *keys: next(config[key] for key in keys if config.get(key) is not None)  # noqa: E731
    heads = one("n_heads", "num_attention_heads")
    writer.add_block_count(one("n_layers", "num_hidden_layers"))
    writer.add_context_length(one("max_sequence_length", "max_position_embeddings"))
    writer.add_embedding_length(one("d_model", "hidden_size"))
    writer.add_feed_forward_length(
        one("mlp_hidden_size", "intermediate_size", "dense_intermediate_size")
    )
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("n_kv_heads") or config.get("num_key_value_heads") or heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["expert_intermediate_size"])
    writer.add_mask_token_id(golden_facts(family)["mask_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    tensors = tensors_of(family, config)
    if more is not None:
        more(writer, tensors)
    for name, tensor in tensors.items():
        whole = tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        used = kind if tensor.ndim > 1 and whole and "gate_inp" not in name else Kind.F32
        writer.add_tensor(name, gguf.quantize(tensor, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llm(model: Path, **given: Any) -> LLM:
    return LLM(str(model), "float32", "cpu", kv_memory=0.01, **given)


def golden(family: str) -> LLM:
    return llm(GOLDEN / family, facts=golden_facts(family))


@pytest.mark.parametrize("family", FORMS)
def test_a_file_is_the_folder_it_was_made_of(family: str, tmp_path: Path) -> None:
    found, folder = llm(write(family, tmp_path / "a.gguf")), golden(family)
    assert torch.equal(found.logits(IDS), folder.logits(IDS))
    assert found.facts == folder.facts and found.loaded.family == folder.loaded.family
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert found.generate([5, 6, 7], params)[0].token_ids == (
        folder.generate([5, 6, 7], params)[0].token_ids
    )


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("family", ["llada_gqa", "dream"])
def test_stored_kinds(family: str, kind: Kind, tmp_path: Path) -> None:
    """Each weight is what the package's own rounding makes of it."""
    found = llm(write(family, tmp_path / "a.gguf", kind)).loaded.model
    exact = golden(family).loaded.model
    for name in ("embedding.weight", "layers.1.mlp.down.weight", "layers.2.attention.out.weight"):
        weight = exact.get_parameter(name).numpy()
        rounded = gguf.dequantize(gguf.quantize(weight, kind), kind).reshape(weight.shape)
        assert np.array_equal(found.get_parameter(name).numpy(), rounded), name
    qkv = "layers.0.attention.qkv.weight"
    off = found.get_parameter(qkv) - exact.get_parameter(qkv)
    assert 0 < off.abs().max() < 0.1 * exact.get_parameter(qkv).abs().max()


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q8_0])
def test_rows_in_pieces(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random blocks, some rows at a time: what the package makes of the whole."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 50, (24, 2 * 256 // block * size), dtype=np.uint8)  # no NaN in scales
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llada")
    writer.add_head_count(3)
    writer.add_tensor("blk.0.ffn_up.weight", stored, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_q.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(weights, "AT_ONCE", 5 * 512)
    tensors = GGUF(tmp_path / "a.gguf").tensors()
    whole = torch.from_numpy(gguf.dequantize(stored, kind))
    pieces = list(tensors.pieces("blk.0.ffn_up.weight"))
    assert [rows.stop - rows.start for rows, _ in pieces] == [5, 5, 5, 5, 4]
    assert torch.equal(torch.cat([piece for _, piece in pieces]), whole)
    pieces = list(tensors.pieces("blk.0.attn_q.weight"))
    assert [rows.stop - rows.start for rows, _ in pieces] == [8, 8, 8]  # whole heads
    found = torch.cat([piece for _, piece in pieces])
    assert torch.equal(interleave(found, 3), whole) and not torch.equal(found, whole)


@pytest.mark.parametrize("quant", ["int8", "int4:group=32"])
def test_quantized_at_load(quant: str, tmp_path: Path) -> None:
    file = write("llada", tmp_path / "a.gguf")
    folder = llm(GOLDEN / "llada", quant=quant)
    assert torch.equal(llm(file, quant=quant).logits(IDS), folder.logits(IDS))
    with pytest.raises(RequestError, match="original checkpoint"):
        list(quantize(str(file), tmp_path / "b", quant))


# Settings


def shape_in(path: Path, **keys: Any) -> ModelConfig:
    """Of the tiny LLaDA's file with these keys behind the architecture's name."""

    def more(writer: gguf.GGUFWriter, _: dict) -> None:
        for key, value in keys.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_string)(f"llada.{key}", value)

    file = GGUF(write("llada", path, more=more))
    shape: ModelConfig = llada.shape(file.json("config.json"))
    return shape


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_scaled_rotary_embeddings(keys: dict, scaling: dict | None, tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "llada" / "config.json").read_text())
    folder = llada.shape(config | {"rope_scaling": scaling})
    assert shape_in(tmp_path / "a.gguf", **keys).rope_scaling == folder.rope_scaling


def test_settings_that_change_nothing(tmp_path: Path) -> None:
    given = {
        "attention.causal": False,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 16,
        "expert_shared_count": 0,
        "vocab_size": 320,
    }
    assert shape_in(tmp_path / "a.gguf", **given) == shape_in(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", True),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.scale", 0.5),
        ("attention.sliding_window", 64),
        ("attention.value_length", 32),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 8.0),
        ("expert_gating_func", 2),
        ("expert_shared_count", 1),
        ("final_logit_softcapping", 30.0),
        ("leading_dense_block_count", 1),
        ("logit_scale", 0.5),
        ("residual_scale", 0.5),
        ("rope.dimension_count", 8),
        ("rope.scaling.attn_factor", 2.0),
        ("rope.scaling.yarn_log_multiplier", 0.5),
        ("use_parallel_residual", True),
    ],
)
def test_settings_that_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    keys = {key: value} | ({"rope.scaling.factor": 2.0} if "attn_factor" in key else {})
    with pytest.raises(CheckpointError, match=re.escape(f"'llada.{key}': {value!r}, which is not")):
        shape_in(tmp_path / "a.gguf", **keys)


def test_logits_that_are_shifted_otherwise(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter, _: dict) -> None:
        writer.add_diffusion_shift_logits(True)

    said = refusal(write("llada", tmp_path / "a.gguf", more=more))
    assert "'diffusion.shift_logits': True; only False" in said
    GGUF(write("dream", tmp_path / "b.gguf", more=more)).json("config.json")


# Text


ADDED = {"<|begin|>": 304, "<|end|>": 305, "<think>": 306, "<|eot_id|>": 307, "<|mask|>": 311}
TEXT = "The cat isn't on 12345 mats.\n\n 你好，世界 e\u0301\r\n\t x"


def trained(pre: str) -> tokenizers.Tokenizer:
    """A byte-level BPE of at most 300 tokens, by the library."""
    made = tokenizers.Tokenizer.from_str(json.dumps(byte_level(**FRAMES[pre])))
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([TEXT, "the cat sat on the mat 12 1 2\n\n\n"] * 3, trainer)
    return made


def add_text(made: tokenizers.Tokenizer, pre: str) -> Callable:
    """Adds the tokenizer with ADDED, holes between, and a chat template."""
    model = json.loads(made.to_str())["model"]
    known = {id: (token, 1) for token, id in model["vocab"].items()}
    known |= {id: (token, 4 if token == "<think>" else 3) for token, id in ADDED.items()}
    tokens, kinds = zip(*(known.get(id, (f"[PAD{id}]", 5)) for id in range(312)), strict=True)

    def more(writer: gguf.GGUFWriter, _: dict) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_bos_token_id(ADDED["<|begin|>"])
        writer.add_eot_token_id(ADDED["<|eot_id|>"])
        text = "{{ bos_token }}{{ messages[0].content }}<|eot_id|>"
        names = {"default": text, "short": "{{ messages[0].content }}"}
        writer.add_chat_template([{"name": n, "template": x} for n, x in names.items()])

    return more


@pytest.mark.parametrize("pre", FRAMES)
def test_tokenizer(pre: str, tmp_path: Path) -> None:
    made = trained(pre)
    found = llm(write("llada", tmp_path / "a.gguf", more=add_text(made, pre)))
    tokenizer = found.tokenizer
    assert tokenizer is not None
    assert tokenizer.encode(TEXT) == made.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == made.decode(made.encode(TEXT).ids)
    assert [tokenizer.id_of(token) for token in ADDED] == list(ADDED.values())
    assert tokenizer.special_ids == set(ADDED.values()) - {ADDED["<think>"]}
    assert tokenizer.token_of(309) is None and tokenizer.decode([309]) == ""
    assert not set(ADDED.values()) & set(tokenizer.encode("".join(ADDED)))
    assert found.facts.eos_ids == {305, 307}
    ids = found.prompts.chat([{"role": "user", "content": "cat"}])
    assert ids == [304, *made.encode("cat").ids, 307]
    short = found.prompts.chat([{"role": "user", "content": "cat"}], chat_template="short")
    assert short == made.encode("cat").ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # GPT-2 leaves the last white space to what follows; the others take line ends together.
        ("gpt-2", "ab123\n\nc", ["ab", "123", "Ċ", "Ċ", "c"]),
        ("smollm", "ab123\n\nc", ["ab", "1", "2", "3", "Ċ", "Ċ", "c"]),
        ("qwen2", "ab123\n\nc", ["ab", "1", "2", "3", "ĊĊ", "c"]),
        ("llama-bpe", "ab1234\n\nc", ["ab", "123", "4", "ĊĊ", "c"]),
        ("bailingmoe", "I'LL123\n\nc", ["I", "'LL", "1", "2", "3", "ĊĊ", "c"]),
    ],
)
def test_words(pre: str, text: str, pieces: list[str]) -> None:
    """By hand, from the published patterns; a line end is written "Ċ"."""
    words = tokenizers.Tokenizer.from_str(json.dumps(byte_level(**FRAMES[pre]))).pre_tokenizer
    assert [piece for piece, _ in words.pre_tokenize_str(text)] == pieces


# What does not load


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(str(path), "float32", "cpu")
    return str(caught.value)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("llada", tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install dinfer[gguf]" in refusal(path)


def test_an_adapter_needs_a_folder(tmp_path: Path) -> None:
    """The tensors of a file have other names than those that an adapter changes."""
    path = write("llada", tmp_path / "x.gguf")
    with pytest.raises(RequestError, match="give the folder"):
        load(str(path), "float32", "cpu", lora=str(tmp_path))


def test_no_gguf(tmp_path: Path) -> None:
    path = write("llada", tmp_path / "a.gguf")
    whole = path.read_bytes()
    for keep in (0, 3, 30, 3000, len(whole) - 200):
        path.write_bytes(whole[:keep])
        assert "no readable GGUF file" in refusal(path)
    path.write_bytes(b"{}" * 99)
    assert "no readable GGUF file" in refusal(path)
    with pytest.raises(UnknownName, match="GGUF file"):
        load(str(tmp_path / "b.gguf"))


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    def damage(_: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.attn_k.weight.old"] = tensors.pop("blk.1.attn_k.weight")

    said = refusal(write("llada", tmp_path / "a.gguf", more=damage))
    assert "1 of 30 missing: blk.1.attn_k.weight; 1 unexpected: blk.1.attn_k.weight.old" in said

    def shrink(_: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.1.attn_k.weight"] = tensors["blk.1.attn_k.weight"][:, :32].copy()

    said = refusal(write("llada", tmp_path / "b.gguf", more=shrink))
    assert "blk.1.attn_k.weight has the shape [64, 32]" in said


def test_other_architectures_and_tokenizers(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "'llama'" in (said := refusal(tmp_path / "a.gguf")) and "Allowed: dream, llada" in said

    def more(writer: gguf.GGUFWriter, _: dict) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("falcon")
        writer.add_token_list(["a"])

    said = refusal(write("llada", tmp_path / "b.gguf", more=more))
    assert "'falcon'" in said and "qwen2" in said
