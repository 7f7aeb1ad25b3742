"""Models with random weights, by name: what a step costs at the sizes people run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dinfer.errors import DinferError, RequestError
from dinfer.loader.load import Loaded, blank, empty, family_of, load, resolve_device, resolve_dtype
from dinfer.loader.weights import Pieces, fill, places, row_ranges
from dinfer.model import llada
from dinfer.nn import quantized
from dinfer.nn.quantized import QuantizedWeight
from dinfer.nn.weight_map import official


@dataclass(frozen=True)
class Sizes:
    """Sizes of a named shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int


SHAPES = {
    "tiny": Sizes(256, 4, 4, 4, 640, 832),
    "135m": Sizes(576, 30, 9, 3, 1536, 49152),
    "mid": Sizes(1024, 12, 16, 16, 3072, 126464),
    "0.7b": Sizes(1280, 20, 10, 10, 3456, 126464),
    "1.3b": Sizes(1792, 22, 14, 14, 4864, 126464),
    "3b": Sizes(2560, 28, 20, 20, 6912, 126464),
    "7b": Sizes(4096, 32, 32, 32, 9984, 126464),
    "13b": Sizes(5120, 38, 40, 40, 13312, 126464),
    "moe-7b-active": Sizes(2048, 16, 16, 16, 8192, 157184),
    "moe-16b-active": Sizes(2048, 20, 16, 4, 4608, 157184),
}
"""Of LLaDA form. The vocabulary of LLaDA but for the two smallest; `mid` is the size of published
CPU figures. `-active`: as wide as the experts together that a row of the mixture runs through.
"""

_LLADA_MOE = {
    "architectures": ["LLaDAMoEModelLM"],
    "rope_theta": 50000.0,
    "qk_layernorm": True,
    "mask_token_id": 1,
    "eos_token_id": 0,
}
FORMS: dict[str, dict[str, Any]] = {
    "moe-tiny": _LLADA_MOE
    | {"vocab_size": 832, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_experts": 8, "num_experts_per_tok": 2, "expert_intermediate_size": 64},
    "moe-7b": _LLADA_MOE
    | {"vocab_size": 157184, "hidden_size": 2048, "num_hidden_layers": 16}
    | {"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8}
    | {"expert_intermediate_size": 1024},
    "moe-16b": {
        "architectures": ["LLaDA2MoeModelLM"],
        "rope_theta": 600000.0,
        "mask_token_id": 1,
        "eos_token_id": 0,
        "vocab_size": 157184,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "fast-dllm-v2-1.5b": {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bd_size": 32,
        "mask_token_id": 151665,
        "eos_token_id": 151645,
    },
}
"""Shapes of other forms, by their config.json. With experts: LLaDA-MoE's (7b) and LLaDA2-mini's
(16b). With grouped heads, biases and a head that is the embedding: that of Fast-dLLM v2.
"""


def config_of(sizes: Sizes, context: int) -> dict[str, Any]:
    """The config.json of a shape, with the keys of official LLaDA checkpoints."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": sizes.hidden,
        "embedding_dropout": 0.0,
        "embedding_size": sizes.vocab,
        "eos_token_id": 0,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_device": "cpu",
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": sizes.vocab - 1,
        "max_sequence_length": context,
        "mlp_hidden_size": sizes.intermediate,
        "mlp_ratio": 4,
        "n_heads": sizes.heads,
        "n_kv_heads": sizes.kv_heads,
        "n_layers": sizes.layers,
        "pad_token_id": 0,
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 500000.0,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "vocab_size": sizes.vocab,
        "weight_tying": False,
    }


def random_model(
    name: str,
    dtype: str,
    device: str,
    context: int = 4096,
    quant: str | None = None,
    compiled: bool | None = None,
) -> Loaded:
    """A named shape with random weights (uniform, scaled as at the start of training), made some
    rows at a time and quantized at once, so that little more than the model is ever in memory.
    """
    dense = SHAPES.get(name)
    config = config_of(dense, context) if dense else FORMS[name]
    config = {"max_position_embeddings": context} | config
    family, place = family_of(config), resolve_device(device)
    shape = family.shape(config)
    kind = resolve_dtype(dtype, config, place)
    model = empty(family, shape, kind, place, quant, compiled)
    _draw(places(model, family.slots(shape)))
    quantized.finalize(model)
    model.requires_grad_(False).eval()
    known = family.__name__.rpartition(".")[2]
    return Loaded(name, Path(), known, model, family.facts(config), None, None)


def _draw(targets: Mapping[str, Tensor | QuantizedWeight]) -> None:
    """The same weights for the same shape, whatever they are stored in."""
    torch.manual_seed(0)
    for target in targets.values():
        fill(target, _drawn(tuple(target.shape)))


def _drawn(shape: tuple[int, ...]) -> Pieces:
    """A random matrix, or a vector of ones."""
    for rows in row_ranges(shape):
        if len(shape) < 2:
            yield rows, torch.ones(shape)
        else:
            spread = shape[-1] ** -0.5
            yield rows, torch.empty(rows.stop - rows.start, *shape[1:]).uniform_(-spread, spread)


def open_any(
    name: str,
    dtype: str,
    device: str,
    quant: str | None = None,
    facts: dict[str, Any] | None = None,
    family: str | None = None,
    compiled: bool | None = None,
) -> Loaded:
    """A named shape, or what `load` takes."""
    if name in SHAPES or name in FORMS:
        if facts or family:
            said = "Family" if family else "Facts"
            raise RequestError(f"{said} of the shape {name!r} cannot be overridden; use a model.")
        return random_model(name, dtype, device, quant=quant, compiled=compiled)
    try:
        return load(name, dtype, device, facts, quant, family, compiled)
    except DinferError as error:
        raise type(error)(
            f"{error} Shapes with random weights: {', '.join([*SHAPES, *FORMS])}."
        ) from error


def write_checkpoint(name: str, dtype: str, folder: Path, context: int = 4096) -> None:
    """Writes a dense shape as a folder in the official form, with the weights of `random_model`,
    for engines that read only that.
    """
    config = config_of(SHAPES[name], context)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape, cpu = llada.shape(config), torch.device("cpu")
    model = blank(llada, shape, resolve_dtype(dtype, config, cpu)).to_empty(device=cpu)
    _draw(places(model, llada.slots(shape)))
    tensors = official(model, llada.slots(shape))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
