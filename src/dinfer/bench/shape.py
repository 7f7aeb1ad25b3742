"""Models of LLaDA form with random weights, by name: what a step costs at the sizes people run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dinfer.engine.load import Loaded, load, resolve_device, resolve_dtype
from dinfer.errors import DinferError
from dinfer.model import llada
from dinfer.nn.weights import official


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
}
"""The vocabulary of LLaDA but for the two smallest; `mid` is the size of published CPU figures."""


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


def random_model(name: str, dtype: str, device: str, context: int = 4096) -> Loaded:
    """A named shape with random weights (uniform, scaled as at the start of training)."""
    config = config_of(SHAPES[name], context)
    place = resolve_device(device)
    kind = resolve_dtype(dtype, config, place)
    shape = llada.shape(config)
    with torch.device("meta"):
        model = llada.Model(shape)
    model = model.to(kind).to_empty(device=place)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.0
            parameter.uniform_(-spread, spread) if spread else parameter.fill_(1.0)
    model.requires_grad_(False).eval()
    return Loaded(name, Path(), "llada", model, llada.facts(config), None, None)


def open_any(name: str, dtype: str, device: str) -> Loaded:
    """A named shape, or what `load` takes."""
    if name in SHAPES:
        return random_model(name, dtype, device)
    try:
        return load(name, dtype, device)
    except DinferError as error:
        raise type(error)(f"{error} Shapes with random weights: {', '.join(SHAPES)}.") from error


def write_checkpoint(loaded: Loaded, folder: Path, context: int = 4096) -> None:
    """Writes a random model as a folder in the official form, for engines that read only that."""
    config = config_of(SHAPES[loaded.name], context)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = official(loaded.model, llada.slots(loaded.model.shape))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
