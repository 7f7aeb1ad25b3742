"""Checkpoints that others quantized, written here number by number, as their papers and tools say;
and LoRA adapters. Each is compared with the plain checkpoint of the weights that the codes mean.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dinfer import LLM
from dinfer.errors import CheckpointError, DinferError
from dinfer.loader.load import load
from dinfer.loader.quantize import quantize

from ..conftest import GOLDEN, golden_facts

IDS = [7, 100, 211, 42, 9, 311, 250, 3, 311, 311]
Written = dict[str, Tensor]
Writer = Callable[[str, Tensor], tuple[Written, Tensor]]
"""Name and weight -> the tensors of the file, and the weight that they mean."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROJECTIONS += ("attn_out", "ff_proj", "ff_out", "query_key_value", "dense")


def is_projection(name: str) -> bool:
    """Of the layers: such are quantized, while embedding, norms, routers and the head are not."""
    return name.endswith(tuple(f".{noun}.weight" for noun in PROJECTIONS)) and (
        ".layers." in name or ".blocks." in name
    )


def write(folder: Path, family: str, tensors: Written, **config: Any) -> Path:
    folder.mkdir()
    known = json.loads((GOLDEN / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def pair(tmp_path: Path, family: str, writer: Writer, method: dict[str, Any]) -> tuple[Path, Path]:
    """The checkpoint of codes, and that of the weights they mean."""
    plain = load_file(GOLDEN / family / "model.safetensors")
    coded: Written = {}
    for name, x in list(plain.items()):
        if is_projection(name):
            parts, plain[name] = writer(name, x)
            coded |= parts
        else:
            coded[name] = x
    assert len(coded) > len(plain)
    return (
        write(tmp_path / "coded", family, coded, quantization_config=method),
        write(tmp_path / "plain", family, plain),
    )


def logits(folder: Path, family: str, **options: Any) -> Tensor:
    facts = golden_facts(family)
    return LLM(str(folder), "float32", "cpu", facts=facts, kv_memory=0.01, **options).logits(IDS)


def blocks(x: Tensor, down: int, across: int) -> dict[tuple[int, int], Tensor]:
    """Views of the blocks of a matrix by their place."""
    return {
        (i // down, j // across): x[i : i + down, j : j + across]
        for i in range(0, x.shape[0], down)
        for j in range(0, x.shape[1], across)
    }


def fp8(down: int | None, across: int | None, suffix: str, shape: Callable[..., Any]) -> Writer:
    def written(name: str, x: Tensor) -> tuple[Written, Tensor]:
        cut = blocks(x, down or x.shape[0], across or x.shape[1])
        scales = torch.empty(max(i for i, _ in cut) + 1, max(j for _, j in cut) + 1)
        codes, meant = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.clone()
        for place, part in cut.items():
            scales[place] = part.abs().max() / 448
        for place, part in blocks(meant, down or x.shape[0], across or x.shape[1]).items():
            small = (part / scales[place]).to(torch.float8_e4m3fn)
            blocks(codes.view(torch.uint8), down or x.shape[0], across or x.shape[1])[place].copy_(
                small.view(torch.uint8)
            )
            part.copy_(small.float() * scales[place])
        found = {name: codes, f"{name}{suffix}": shape(scales)}
        return found | {name.replace(".weight", ".input_scale"): torch.tensor(3.0)}, meant

    return written


def as_is(scales: Tensor) -> Tensor:
    return scales


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8: dict[str, tuple[Writer, dict[str, Any]]] = {
    "deepseek": (
        fp8(32, 48, "_scale_inv", as_is),
        DEEPSEEK | {"weight_block_size": [32, 48]},
    ),
    "large blocks": (
        fp8(128, 128, "_scale_inv", as_is),
        DEEPSEEK | {"weight_block_size": [128, 128]},
    ),
    "per tensor": (
        fp8(None, None, "_scale", torch.Tensor.flatten),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "scalar": (fp8(None, None, "_scale_inv", torch.Tensor.squeeze), DEEPSEEK),
    "per row": (fp8(1, None, "_scale", as_is), {"quant_method": "fp8"}),
    "compressed per row": (
        fp8(1, None, "_scale", as_is),
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "compressed blocks": (
        fp8(128, 128, "_scale", as_is),
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "block",
                        "block_structure": [128, 128],
                    },
                }
            },
        },
    ),
}


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize("family", ["sdar", "llada", "llada2_moe"])
@pytest.mark.parametrize("form", FP8)
def test_fp8(form: str, family: str, tmp_path: Path) -> None:
    coded, plain = pair(tmp_path, family, *FP8[form])
    assert torch.equal(logits(coded, family), logits(plain, family))


def packed(numbers: list[int], bits: int) -> int:
    """Into 32 bits, the first number lowest; as a signed integer, which the files have."""
    whole = sum(number << (bits * place) for place, number in enumerate(numbers))
    return whole - (1 << 32) if whole >= 1 << 31 else whole


def grouped(x: Tensor, bits: int, columns: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [O, I] from 0 on, zeros and scales [O, G], and what they mean; columns: the group of
    each.
    """
    count, top = max(columns) + 1, 2**bits - 1
    scales, zeros = torch.empty(len(x), count), torch.empty(len(x), count, dtype=torch.int64)
    codes, meant = torch.empty_like(x, dtype=torch.int64), torch.empty_like(x)
    for group in range(count):
        chosen = [column for column, its in enumerate(columns) if its == group]
        part = x[:, chosen]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = ((high - low) / top).half().float()
        zero = (-low / scale).round().clamp(1, top)  # GPTQ's first form has no zero of 0
        code = (part / scale[:, None] + zero[:, None]).round().clamp(0, top)
        scales[:, group], zeros[:, group], codes[:, chosen] = scale, zero.long(), code.long()
        meant[:, chosen] = (code - zero[:, None]) * scale[:, None]
    return codes, zeros, scales, meant


def groups_of(size: int, group: int, shuffled: bool = False) -> list[int]:
    columns = [column // group for column in range(size)]
    if shuffled:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(size)).tolist()
        columns = [columns[place] for place in order]
    return columns


def gptq(bits: int, group: int, shuffled: bool, version: str) -> Writer:
    def written(name: str, x: Tensor) -> tuple[Written, Tensor]:
        out, size = x.shape
        columns = groups_of(size, group if group > 0 else size, shuffled)
        codes, zeros, scales, meant = grouped(x, bits, columns)
        many, off = 32 // bits, 1 if version == "gptq" else 0
        qweight = torch.tensor(
            [
                [packed(codes[o, i : i + many].tolist(), bits) for o in range(out)]
                for i in range(0, size, many)
            ],
            dtype=torch.int32,
        )
        qzeros = torch.tensor(
            [
                [packed((zeros[o : o + many, g] - off).tolist(), bits) for o in range(0, out, many)]
                for g in range(zeros.shape[1])
            ],
            dtype=torch.int32,
        )
        lead = name.removesuffix(".weight")
        found = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.half()}
        found |= {"g_idx": torch.tensor(columns, dtype=torch.int32)}
        return {f"{lead}.{part}": x for part, x in found.items()}, meant

    return written


def awq(group: int) -> Writer:
    def written(name: str, x: Tensor) -> tuple[Written, Tensor]:
        out, size = x.shape
        codes, zeros, scales, meant = grouped(x, 4, groups_of(size, group))
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order_map: which neighbour each place holds

        def row(numbers: Tensor) -> list[int]:
            return [
                packed([int(numbers[o + place]) for place in order], 4) for o in range(0, out, 8)
            ]

        lead = name.removesuffix(".weight")
        qweight = torch.tensor([row(codes[:, i]) for i in range(size)], dtype=torch.int32)
        qzeros = torch.tensor([row(zeros[:, g]) for g in range(zeros.shape[1])], dtype=torch.int32)
        found = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.half()}
        return {f"{lead}.{part}": x for part, x in found.items()}, meant

    return written


def compressed(bits: int, group: int, shuffled: bool, pack: bool, symmetric: bool) -> Writer:
    def written(name: str, x: Tensor) -> tuple[Written, Tensor]:
        out, size = x.shape
        columns = groups_of(size, group if group > 0 else size, shuffled)
        middle = 2 ** (bits - 1)
        codes, zeros, scales, meant = grouped(x, bits, columns)
        if symmetric:
            index = torch.tensor(columns)
            scales = scales * 2
            codes = (x / scales[:, index] + middle).round().clamp(0, 2 * middle - 1).long()
            meant = (codes - middle) * scales[:, index]
        found: Written = {"weight_scale": scales}
        if pack:
            many = 32 // bits
            rows = [
                [packed(row[i : i + many], bits) for i in range(0, size, many)]
                for row in codes.tolist()
            ]
            found["weight_packed"] = torch.tensor(rows, dtype=torch.int32)
            found["weight_shape"] = torch.tensor([out, size])
            if not symmetric:
                found["weight_zero_point"] = torch.tensor(
                    [
                        [
                            packed(zeros[o : o + many, g].tolist(), bits)
                            for g in range(zeros.shape[1])
                        ]
                        for o in range(0, out, many)
                    ],
                    dtype=torch.int32,
                )
        else:
            found["weight"] = (codes - middle).to(torch.int8)
            if not symmetric:
                found["weight_zero_point"] = (zeros - middle).to(torch.int8)
        if shuffled:
            found["weight_g_idx"] = torch.tensor(columns, dtype=torch.int32)
        lead = name.removesuffix(".weight")
        return {f"{lead}.{part}": x for part, x in found.items()}, meant

    return written


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    groups = {"config_groups": {"group_0": group}, "format": form}
    return {"quant_method": "compressed-tensors", **groups}


PACKED: dict[str, tuple[Writer, dict[str, Any]]] = {
    "gptq": (
        gptq(4, 16, False, "gptq"),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False},
    ),
    "gptq act order": (
        gptq(4, 32, True, "gptq"),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    ),
    "gptq v2, 8 bits, one group": (
        gptq(8, -1, False, "gptq_v2"),
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": -1,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "awq": (
        awq(16),
        {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
    ),
    "compressed, packed": (
        compressed(4, 16, False, True, True),
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=16),
    ),
    "compressed, packed, zeros, act order": (
        compressed(4, 32, True, True, False),
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "compressed, packed, 8 bits a row": (
        compressed(8, -1, False, True, True),
        compressed_config("pack-quantized", num_bits=8, strategy="channel"),
    ),
    "compressed, int8 a row with zeros": (
        compressed(8, -1, False, False, False),
        compressed_config("int-quantized", num_bits=8, strategy="channel"),
    ),
}


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize("form", PACKED)
def test_packed_integers(form: str, tmp_path: Path) -> None:
    coded, plain = pair(tmp_path, "sdar", *PACKED[form])
    assert torch.equal(logits(coded, "sdar"), logits(plain, "sdar"))


def test_the_first_form_of_gptq_has_a_file_of_its_own(tmp_path: Path) -> None:
    coded, plain = pair(tmp_path, "sdar", *PACKED["gptq"])
    config = json.loads((coded / "config.json").read_text())
    settings = config.pop("quantization_config")
    settings.pop("quant_method")
    (coded / "config.json").write_text(json.dumps(config))
    (coded / "quantize_config.json").write_text(json.dumps(settings))
    assert torch.equal(logits(coded, "sdar"), logits(plain, "sdar"))


@pytest.mark.parametrize("quant", ["int8", "int4:group=32"])
def test_codes_of_others_are_quantized_anew_where_asked(quant: str, tmp_path: Path) -> None:
    coded, plain = pair(tmp_path, "sdar", *PACKED["awq"])
    wanted = logits(plain, "sdar", quant=quant)
    assert torch.equal(logits(coded, "sdar", quant=quant), wanted)
    list(quantize(str(coded), tmp_path / "ours", quant))
    assert torch.equal(logits(tmp_path / "ours", "sdar"), wanted)


def test_tensors_are_named_as_the_family_has_them(tmp_path: Path) -> None:
    """What is missing is called as it would be in a plain checkpoint."""
    coded, _ = pair(tmp_path, "sdar", *PACKED["gptq"])
    tensors = load_file(coded / "model.safetensors")
    gone = "model.layers.1.mlp.up_proj"
    kept = {name: x for name, x in tensors.items() if not name.startswith(gone)}
    save_file(kept, coded / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 of \d+ missing: {gone}\.weight"):
        load(str(coded), "float32", "cpu", golden_facts("sdar"))
    for part, said in (("qweight", "scales"), ("qzeros", "qzeros"), ("g_idx", "g_idx")):
        short = {f"{gone}.{part}": tensors[f"{gone}.{part}"][:-2]}
        save_file(tensors | short, coded / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"{gone}.{said} has the shape"):
            load(str(coded), "float32", "cpu", golden_facts("sdar"))


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("bitsandbytes", "'bitsandbytes', which is not supported. Allowed: dinfer, fp8"),
        ({"quant_method": "gptq", "bits": 3}, "'bits': 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'version': 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "'bits': 8"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "2:4"}},
            "sparsity_config",
        ),
    ],
)
def test_forms_that_are_refused(method: Any, said: str, tmp_path: Path) -> None:
    folder = write(
        tmp_path / "x",
        "sdar",
        load_file(GOLDEN / "sdar" / "model.safetensors"),
        quantization_config=method,
    )
    with pytest.raises(CheckpointError) as caught:
        load(str(folder), "float32", "cpu")
    assert said in str(caught.value) and str(caught.value).endswith(".")


# Adapters


def adapter(folder: Path, tensors: Written, **config: Any) -> Path:
    folder.mkdir()
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    named = {f"base_model.model.{name}": x for name, x in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def low_rank(weights: Written, names: list[str], rank: int = 4) -> Written:
    draw = torch.Generator().manual_seed(3)
    found = {}
    for name in names:
        out, size = weights[f"{name}.weight"].shape
        found[f"{name}.lora_A.weight"] = torch.randn(rank, size, generator=draw) / 8
        found[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=draw) / 8
    return found


def near(one: Tensor, other: Tensor, limit: float = 1e-5) -> bool:
    return bool(torch.linalg.norm(one - other) < limit * torch.linalg.norm(other))


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("family", ["sdar", "llada", "llada2_moe"])
@pytest.mark.parametrize(
    ("config", "scale"), [({}, 12 / 4), ({"use_rslora": True}, 12 / math.sqrt(4))]
)
def test_an_adapter_is_added_to_the_weights(
    family: str, config: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    weights = load_file(GOLDEN / family / "model.safetensors")
    names = [name.removesuffix(".weight") for name in weights if is_projection(name)]
    parts = low_rank(weights, names)
    for name in names:
        a, b = parts[f"{name}.lora_A.weight"], parts[f"{name}.lora_B.weight"]
        weights[f"{name}.weight"] += scale * b @ a
    plain = write(tmp_path / "plain", family, weights)
    lora = adapter(tmp_path / "lora", parts, **config)
    found = logits(GOLDEN / family, family, lora=str(lora))
    assert near(found, logits(plain, family))
    assert not near(found, logits(GOLDEN / family, family), 1e-2)


def test_patterns_name_single_modules(tmp_path: Path) -> None:
    weights = load_file(GOLDEN / "sdar" / "model.safetensors")
    parts = low_rank(weights, [Q]) | low_rank(weights, [DOWN], rank=2)
    for name, scale in ((Q, 12 / 4), (DOWN, 7 / 2)):
        a, b = parts[f"{name}.lora_A.weight"], parts[f"{name}.lora_B.weight"]
        weights[f"{name}.weight"] += scale * b @ a
    patterns = {"rank_pattern": {"mlp.down_proj": 2}, "alpha_pattern": {r".*\.1\..*down_proj": 7}}
    lora = adapter(tmp_path / "lora", parts, **patterns)
    found = logits(GOLDEN / "sdar", "sdar", lora=str(lora))
    assert near(found, logits(write(tmp_path / "plain", "sdar", weights), "sdar"))


def test_dora_embeddings_and_whole_weights(tmp_path: Path) -> None:
    """Magnitudes are lengths of rows; PEFT keeps an embedding's matrices transposed."""
    weights = load_file(GOLDEN / "sdar" / "model.safetensors")
    parts, table = low_rank(weights, [Q]), "model.embed_tokens"
    draw = torch.Generator().manual_seed(5)
    vocab, hidden = weights[f"{table}.weight"].shape
    lengths = torch.rand(len(weights[f"{Q}.weight"]), generator=draw) + 0.5
    norm = torch.rand(hidden, generator=draw)
    weights[f"{table}.weight"] = torch.randn(vocab, hidden, generator=draw)
    parts |= {
        f"{Q}.lora_magnitude_vector": lengths,
        f"{table}.base_layer.weight": weights[f"{table}.weight"].clone(),
        f"{table}.lora_embedding_A": torch.randn(4, vocab, generator=draw) / 8,
        f"{table}.lora_embedding_B": torch.randn(hidden, 4, generator=draw) / 8,
        "model.norm.weight": norm,
    }
    merged = weights[f"{Q}.weight"] + 3 * parts[f"{Q}.lora_B.weight"] @ parts[f"{Q}.lora_A.weight"]
    for row in range(len(merged)):
        merged[row] *= lengths[row] / math.sqrt(sum(float(x) ** 2 for x in merged[row]))
    a, b = parts[f"{table}.lora_embedding_A"], parts[f"{table}.lora_embedding_B"]
    weights |= {f"{Q}.weight": merged, "model.norm.weight": norm}
    weights[f"{table}.weight"] += 3 * (b @ a).T
    more = {f"{table}.lora_magnitude_vector": torch.ones(hidden)}
    assert "DoRA on the embedding" in refusal(adapter(tmp_path / "x", parts | more))
    lora = adapter(tmp_path / "lora", parts, use_dora=True)
    found = logits(GOLDEN / "sdar", "sdar", lora=str(lora))
    assert near(found, logits(write(tmp_path / "plain", "sdar", weights), "sdar"))


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize("base", ["int8", "int4:group=32", "awq"])
def test_an_adapter_over_a_quantized_base(base: str, tmp_path: Path) -> None:
    """The base's codes are made plain, the adapter is added, and what was ours is coded anew."""
    if base == "awq":
        coded, plain = pair(tmp_path, "sdar", *PACKED["awq"])
        weights = load_file(plain / "model.safetensors")
        quant = None
    else:
        coded, quant = tmp_path / "coded", base
        list(quantize(str(GOLDEN / "sdar"), coded, base))
        held = load_file(coded / "model.safetensors")
        weights = load_file(GOLDEN / "sdar" / "model.safetensors")
        for name in weights:
            if f"{name}_scale" in held:
                weights[name] = meant(held[name], held[f"{name}_scale"])
    parts = low_rank(weights, [Q, DOWN])
    for name in (Q, DOWN):
        a, b = parts[f"{name}.lora_A.weight"], parts[f"{name}.lora_B.weight"]
        weights[f"{name}.weight"] += 3 * b @ a
    merged = write(tmp_path / "merged", "sdar", weights)
    lora = adapter(tmp_path / "lora", parts)
    found = logits(coded, "sdar", lora=str(lora))
    assert near(found, logits(merged, "sdar", quant=quant), 1e-3)
    assert not near(found, logits(coded, "sdar"), 1e-2)


def meant(codes: Tensor, scales: Tensor) -> Tensor:
    """Of our own codes: int8 with a scale a row, or two 4-bit codes a byte, the first one low."""
    if codes.dtype == torch.int8:
        return codes.float() * scales[:, None]
    both = torch.stack((codes % 16, codes // 16), dim=-1).flatten(1).float()
    group = both.shape[1] // scales.shape[1]
    scale, zero = (scales[..., i].float().repeat_interleave(group, 1) for i in (0, 1))
    return (both - 8) * scale + zero


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "'peft_type': 'IA3'; only 'LORA'"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights': 'pissa'"),
        ({"bias": "all"}, "'bias': 'all'"),
        ({"r": 0}, "'r' as 0"),
        ({"lora_alpha": None}, "'lora_alpha' as None"),
    ],
)
def test_adapters_that_are_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    weights = load_file(GOLDEN / "sdar" / "model.safetensors")
    lora = adapter(tmp_path / "lora", low_rank(weights, [Q]), **config)
    assert said in refusal(lora)


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    weights = load_file(GOLDEN / "sdar" / "model.safetensors")
    whole = low_rank(weights, [Q])
    names = [f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"]
    other = {
        f"model.layers.9.q.lora_{x}.weight": whole[name]
        for x, name in zip("AB", names, strict=True)
    }
    assert "1 weights" in refusal(adapter(tmp_path / "a", other))
    assert f"only lora_A of {Q}" in refusal(adapter(tmp_path / "b", {names[0]: whole[names[0]]}))
    wide = whole | {names[0]: torch.ones(4, 7)}
    assert f"gives {Q}.weight the shape" in refusal(adapter(tmp_path / "c", wide))
    assert "cannot be multiplied" in refusal(
        adapter(tmp_path / "d", whole | {names[0]: torch.ones(3, 64)})
    )
    assert "holds no adapter_config.json" in refusal(GOLDEN / "sdar")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in refusal(tmp_path / "a")


def test_an_adapter_of_a_model_without_head(tmp_path: Path) -> None:
    """PEFT names the modules of the inner model without `model.`, and old versions write a .bin."""
    weights = load_file(GOLDEN / "sdar" / "model.safetensors")
    parts = low_rank(weights, [Q])
    full = adapter(tmp_path / "full", parts)
    inner = tmp_path / "inner"
    shutil.copytree(full, inner)
    (inner / "adapter_model.safetensors").unlink()
    named = {f"base_model.{name}": x for name, x in parts.items()}
    torch.save(named, inner / "adapter_model.bin")
    found = logits(GOLDEN / "sdar", "sdar", lora=str(inner))
    assert torch.equal(found, logits(GOLDEN / "sdar", "sdar", lora=str(full)))


def refusal(lora: Path) -> str:
    with pytest.raises(DinferError) as caught:
        load(str(GOLDEN / "sdar"), "float32", "cpu", golden_facts("sdar"), lora=str(lora))
    said = str(caught.value)
    assert said.endswith(".")
    return said
