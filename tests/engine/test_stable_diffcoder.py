"""Stable-DiffCoder, whose code is a decoding loop around a plain Llama."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dinfer import LLM, SamplingParams
from dinfer.model import llada, stable_diffcoder

from ..conftest import GOLDEN, golden_cases

BLOCK = 4


def config(**sizes: Any) -> dict[str, Any]:
    """The keys of the released config.json."""
    return {
        "architectures": ["StableDiffcoderForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "layer_norm_eps": None,
        "mlp_bias": False,
        "model_type": "llama",
        "tie_word_embeddings": False,
        **sizes,
    }


def test_one_block_over_everything_is_llada(tmp_path: Path) -> None:
    """The tiny LLaDA's weights under Llama's names: where no block ends, its official logits."""
    given = json.loads((GOLDEN / "llada_gqa" / "config.json").read_text())
    shape = llada.shape(given)
    ours = config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.context,
        num_attention_heads=shape.heads,
        num_hidden_layers=shape.layers,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        vocab_size=shape.vocab,
    )
    (tmp_path / "config.json").write_text(json.dumps(ours))
    names = {slot: name for name, slot in stable_diffcoder.slots(shape).items()}
    weights = load_file(GOLDEN / "llada_gqa" / "model.safetensors")
    renamed = {names[slot]: weights[name] for name, slot in llada.slots(shape).items()}
    save_file(renamed, tmp_path / "model.safetensors")
    model = LLM(str(tmp_path), "float32", "cpu", {"block_length": 1000}, kv_memory=0.01)
    stored = load_file(GOLDEN / "llada_gqa" / "outputs.safetensors")
    cases = [c for c in golden_cases("llada_gqa", "logits") if "cached_from_input_ids" not in c]
    for case in cases:
        found, expected = model.logits(case["input_ids"]), stored[case["logits_tensor"]]
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert cases and model.facts.mask_id == 5


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4, 6, 13])
def test_against_transformers(length: int, tmp_path: Path) -> None:
    """Logits of a random Llama under the block-causal mask, and the released loop over them."""
    transformers = pytest.importorskip("transformers")
    sizes = transformers.LlamaConfig(
        vocab_size=120, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
        rms_norm_eps=1e-6, rope_theta=500000.0,
    )  # fmt: skip
    torch.manual_seed(length)
    official = transformers.LlamaForCausalLM(sizes).eval()
    for x in official.parameters():
        x.data += 0.2 * torch.randn_like(x)
    official.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    theirs = {key: value for key, value in written.items() if key != "rope_parameters"}
    ours = config(rope_theta=500000.0) | {"rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(theirs | ours))
    model = LLM(str(tmp_path), "float32", "cpu", kv_memory=0.01)

    def logits(tokens: list[int]) -> torch.Tensor:
        block = torch.arange(len(tokens)) // BLOCK
        with torch.no_grad():
            out = official(
                torch.tensor([tokens]), attention_mask=(block[None] <= block[:, None])[None, None]
            )
        return out.logits[0]  # type: ignore[no-any-return]

    tokens = torch.randint(6, 120, (length,)).tolist()
    torch.testing.assert_close(model.logits(tokens), logits(tokens), atol=1e-3, rtol=1e-4)
    wanted, passes, threshold = 12 + -length % BLOCK, 0, 0.05
    params = SamplingParams(wanted, decoder=f"threshold:threshold={threshold}", ignore_eos=True)
    (out,) = model.generate(tokens, params)
    while len(tokens) < length + wanted:
        tokens += [5] * (BLOCK - len(tokens) % BLOCK)
        masked = {p for p in range(length, len(tokens)) if tokens[p] == 5}
        while masked:
            found = logits(tokens)
            found[:, 5] = -torch.inf  # the released loop may set the mask token; ours never does
            p, best = found.softmax(dim=1).max(dim=1)
            first = max(masked, key=lambda place: p[place])
            chosen = {place for place in masked if place == first or p[place] >= threshold}
            for place in chosen:
                tokens[place] = int(best[place])
            masked, passes = masked - chosen, passes + 1
    assert out.token_ids == tokens[length:]
    assert out.stats.forward_passes == passes
