"""Dense SDAR (1.7B to 8B): Qwen3 layout, block-causal attention (arXiv 2510.06303)."""

from typing import Any

from dinfer.config import ids, number, refuse, whole
from dinfer.nn.transformer import Shape, Transformer
from dinfer.nn.weights import Slot, layer_slots
from dinfer.step import Facts

ARCHITECTURES = ("SDARForCausalLM",)
Model = Transformer


def shape(config: dict[str, Any]) -> Shape:
    """Sizes from the Qwen3-style keys of config.json; settings that the stack does not have are
    refused.
    """
    refuse(
        config,
        {
            "attention_bias": False,
            "hidden_act": "silu",
            "rope_scaling": None,
            "use_sliding_window": False,
        },
    )
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    return Shape(
        vocab=whole(config, "vocab_size"),
        hidden=hidden,
        layers=whole(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=whole(config, "num_key_value_heads", heads),
        head_size=whole(config, "head_dim", hidden // heads),
        intermediate=whole(config, "intermediate_size"),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope_theta=number(config, "rope_theta"),
        context=whole(config, "max_position_embeddings"),
        qk_norm=True,
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def facts(config: dict[str, Any]) -> Facts:
    """Blocks are counted from position 0 of the whole sequence. The released 4-token block is no
    key of old configs.
    """
    block = whole(config, "block_size", 4)
    return Facts(
        mask_id=config.get("mask_token_id", 151669),
        eos_ids=ids(config, "eos_token_id", 151643),
        block_length=block,
        context=whole(config, "max_position_embeddings"),
        iteration=f"blockwise:length={block}:aligned=true",
        cache="block",
        decoder="threshold:threshold=0.9",
    )


_LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def slots(shape: Shape) -> dict[str, Slot]:
    """Official tensor names (Qwen3 layout)."""
    table = {
        "model.embed_tokens.weight": Slot("embedding.weight"),
        "model.norm.weight": Slot("norm.weight"),
    }
    if not shape.tied:
        table["lm_head.weight"] = Slot("head.weight")
    for i in range(shape.layers):
        names = {noun: f"model.layers.{i}.{name}.weight" for noun, name in _LAYER.items()}
        table |= layer_slots(shape, i, names)
    return table
