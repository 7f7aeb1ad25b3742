"""Dense LLaDA (8B, 1.5 and GQA variants): full bidirectional attention (arXiv 2502.09992)."""

from typing import Any

from dinfer.config import ids, number, refuse, refuse_elsewhere, whole
from dinfer.nn.rope_config import rope_of
from dinfer.nn.transformer import ModelConfig, Transformer
from dinfer.nn.weight_map import WeightSlot, layer_slots
from dinfer.step import ModelInfo

ARCHITECTURES = ("LLaDAModelLM",)
Model = Transformer


def shape(config: dict[str, Any]) -> ModelConfig:
    """Sizes from the OLMo-style keys of config.json; settings that the stack does not have are
    refused.
    """
    expected = {
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "attention_layer_norm": False,
        "input_emb_norm": False,
        "scale_logits": False,
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "partial_rotary_factor": 1,
    }
    refuse(config, expected)
    refuse_elsewhere(config)
    hidden, heads = whole(config, "d_model"), whole(config, "n_heads")
    context = whole(config, "max_sequence_length")
    rope = rope_of(config, context)
    return ModelConfig(
        vocab=whole(config, "embedding_size", config.get("vocab_size")),
        hidden=hidden,
        layers=whole(config, "n_layers"),
        heads=heads,
        kv_heads=whole(config, "n_kv_heads", 1 if config.get("multi_query_attention") else heads),
        head_size=hidden // heads,
        intermediate=whole(config, "mlp_hidden_size", int(number(config, "mlp_ratio", 4) * hidden)),
        norm_eps=number(config, "rms_norm_eps", 1e-5),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        context=context,
        tied=bool(config.get("weight_tying", True)),
    )


def facts(config: dict[str, Any]) -> ModelInfo:
    """LLaDA counts blocks from the end of the prompt; any block length works, 32 is the instruct
    default.
    """
    return ModelInfo(
        mask_id=config.get("mask_token_id", 126336),
        eos_ids=ids(config, "eos_token_id", 126081),
        block_length=None,
        context=whole(config, "max_sequence_length"),
        iteration="blockwise:length=32",
        cache="vicinity:left=16:right=16",
        decoder="threshold:threshold=0.9",
    )


_LAYER = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "attn_out",
    "attention_norm": "attn_norm",
    "mlp_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}


def slots(shape: ModelConfig) -> dict[str, WeightSlot]:
    """Official tensor names. `ff_out` is the down projection inside a block and the head at the
    top.
    """
    table = {
        "model.transformer.wte.weight": WeightSlot("embedding.weight"),
        "model.transformer.ln_f.weight": WeightSlot("norm.weight"),
    }
    if not shape.tied:
        table["model.transformer.ff_out.weight"] = WeightSlot("head.weight")
    for i in range(shape.layers):
        names = {
            noun: f"model.transformer.blocks.{i}.{name}.weight" for noun, name in _LAYER.items()
        }
        table |= layer_slots(shape, i, names)
    return table
