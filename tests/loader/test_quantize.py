"""Models with quantized layers: what is stored how, how near they stay, and folders of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dinfer import LLM, SamplingParams
from dinfer.bench.shape import write_checkpoint
from dinfer.errors import RequestError, UnknownName
from dinfer.kernel.int4 import dequantize_groups
from dinfer.kernel.int8 import quantize_rows
from dinfer.loader.load import Loaded, blank, load
from dinfer.loader.quantize import quantize
from dinfer.model import llada
from dinfer.nn.linear import GroupedLinear, Linear
from dinfer.registry import build

from ..conftest import FAMILIES, GOLDEN, golden_facts

IDS = [7, 100, 211, 42, 9, 311, 250, 3, 311, 311]
QUANTS = ["int8", "int4:group=32"]


def llm(folder: Path, family: str, quant: str | None = None, dtype: str = "float32") -> LLM:
    facts = golden_facts(family)
    return LLM(str(folder), dtype, "cpu", facts=facts, kv_memory=0.01, quant=quant)


def loaded(family: str, quant: str) -> Loaded:
    return load(str(GOLDEN / family), "float32", "cpu", golden_facts(family), quant)


def imitate(model: LLM, quant: str) -> LLM:
    """Rounds the weights of a plain model as the scheme does, and for int8 the rows that come in;
    then the ordinary products give what the integer ones must.
    """
    scheme = build("quant", quant)
    for layer in model.loaded.model.layers.modules():
        if not isinstance(layer, Linear | GroupedLinear) or not scheme.fits(layer.weight.shape[-1]):
            continue
        codes, scales = scheme.quantize(layer.weight.data)
        if quant == "int8":
            layer.weight.data = codes * scales[..., None]
            layer.register_forward_pre_hook(lambda _, args: (rounded(args[0]), *args[1:]))
        else:
            layer.weight.data = dequantize_groups(codes, scales.float())
    return model


def rounded(x: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_rows(x)
    return codes * scales[..., None]


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_models_compute_with_the_rounded_weights(family: str, quant: str) -> None:
    model = llm(GOLDEN / family, family, quant)
    exact = imitate(llm(GOLDEN / family, family), quant).logits(IDS)
    # A row's element near the middle of two codes may fall either way.
    limit = 0.02 if quant == "int8" else 1e-4
    off = torch.linalg.norm(model.logits(IDS) - exact) / torch.linalg.norm(exact)
    assert off < limit
    (out,) = model.generate([5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(out.token_ids) == 20


def test_every_layer_is_quantized_and_nothing_else() -> None:
    model = loaded("llada2_moe", "int8").model
    kept = {name.rpartition("layers.")[2] for name, _ in model.named_parameters()}
    assert {"embedding.weight", "norm.weight", "2.mlp.router.weight"} <= kept
    assert "head.weight" not in kept
    assert not [n for n in kept if any(x in n for x in (".qkv.", ".out.", ".gate_up.", ".down."))]
    assert model.layers[2].mlp.router.weight.dtype == torch.float32


@pytest.mark.usefixtures("plain_weights")
def test_the_head_stays_in_int4() -> None:
    """4 bits of it would cost too much quality."""
    model = loaded("llada", "int4:group=32").model
    assert torch.equal(model.head.weight, load(str(GOLDEN / "llada"), "float32").model.head.weight)


@pytest.mark.usefixtures("plain_weights")
@pytest.mark.parametrize("family", ["llada_moe", "llada2_moe"])
def test_the_router_stays_in_float32_in_a_bfloat16_model(family: str) -> None:
    model = load(str(GOLDEN / family), "bfloat16", "cpu", golden_facts(family)).model
    router = model.layers[-1].mlp.router.weight
    name = "model.layers.2.mlp.gate.weight"
    assert router.dtype == torch.float32 and model.head.weight.dtype == torch.bfloat16
    assert torch.equal(router, load_file(GOLDEN / family / "model.safetensors")[name])


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", ["dream", "sdar_moe", "diffusion_gemma"])
def test_a_quantized_folder_is_the_model_quantized_at_load(
    family: str, quant: str, tmp_path: Path
) -> None:
    target = tmp_path / "small"
    files = dict(quantize(str(GOLDEN / family), target, quant))
    assert len(files) == (2 if family == "sdar_moe" else 1)
    assert all(size == path.stat().st_size for path, size in files.items())
    found = llm(target, family).logits(IDS)
    assert torch.equal(found, llm(GOLDEN / family, family, quant).logits(IDS))
    assert torch.equal(found, llm(target, family, quant).logits(IDS))
    other = "int8" if quant != "int8" else "int4"
    with pytest.raises(RequestError, match=rf"quant is '{other}'.*stored as '{quant}'"):
        llm(target, family, other)
    with pytest.raises(RequestError, match="quantized already"):
        list(quantize(str(target), tmp_path / "again", quant))


def test_sizes_on_disk(tmp_path: Path) -> None:
    """int8: a byte a weight and four a row; int4: half a byte, and four for a group."""
    for quant in ("int8", "int4:group=32"):
        list(quantize(str(GOLDEN / "llada"), tmp_path / quant, quant))
        tensors = load_file(tmp_path / quant / "model.safetensors")
        name = "model.transformer.blocks.1.ff_out.weight"  # [64, 160]
        stored = tensors[name].nbytes + tensors[f"{name}_scale"].nbytes
        assert stored == (64 * 160 + 64 * 4 if quant == "int8" else 64 * 160 // 2 + 64 * 5 * 4)


def test_layers_without_whole_groups_stay(tmp_path: Path) -> None:
    list(quantize(str(GOLDEN / "llada"), tmp_path / "x", "int4:group=64"))
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    kept = tensors["model.transformer.blocks.1.ff_out.weight"]  # rows of 160
    assert kept.dtype == torch.float32
    assert tensors["model.transformer.blocks.1.ff_proj.weight"].dtype == torch.uint8
    assert llm(tmp_path / "x", "llada").logits(IDS).isfinite().all()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"'int5'.*Allowed: int4, int8"):
        loaded("llada", "int5")
    with pytest.raises(RequestError, match="group is 48"):
        build("quant", "int4:group=48")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(RequestError, match="no empty folder"):
        list(quantize(str(GOLDEN / "llada"), tmp_path / "full", "int8"))


MEASURE = """
import re, sys, torch
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
base = peak()
from dinfer.loader.load import load
load(sys.argv[1], "bfloat16", "cpu", quant=sys.argv[2])
print(peak() - base)
"""


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_peak_memory_of_loading(quant: str, tmp_path: Path) -> None:
    """At most 1.15 times the quantized weights, what importing takes included (Linux)."""
    write_checkpoint("0.7b", "bfloat16", tmp_path)
    shape = llada.shape(json.loads((tmp_path / "config.json").read_text()))
    small = blank(llada, shape, torch.bfloat16, quant)
    size = sum(x.nbytes for x in (*small.parameters(), *small.buffers()))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), quant]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1.15 * size
