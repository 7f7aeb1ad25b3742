"""Config keys and tensor names that most families share: those of Llama and Qwen checkpoints in
Hugging Face form.
"""

from typing import Any

from dinfer.config import number, refuse, refuse_elsewhere, whole
from dinfer.nn.rope_config import rope_of
from dinfer.nn.transformer import ModelConfig
from dinfer.nn.weight_map import WeightSlot, layer_slots

ATTENTION = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
}
QK_NORMS = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
QKV_BIASES = {f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
NORMS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}
MLP = {x: f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
EXPERTS = {"router": "mlp.gate.weight"} | {
    f"expert_{x}": f"mlp.experts.{{}}.{x}_proj.weight" for x in ("gate", "up", "down")
}


def shape_of(config: dict[str, Any], partial: float | None = None, **more: Any) -> ModelConfig:
    """Sizes from the shared keys; `more` adds or replaces fields. Settings that the stack does not
    have are refused.

    partial: share of a head's channels that is rotated where the config does not say it; None = the
    family rotates all, and a config that says otherwise is refused.
    """
    refuse(config, {"hidden_act": "silu"})
    refuse_elsewhere(config)
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    context = whole(config, "max_position_embeddings")
    head_size = more.pop("head_size", None) or whole(config, "head_dim", hidden // heads)
    rope = rope_of(config, context)
    share = rope.partial or partial or 1.0
    if partial is None:
        refuse({"partial_rotary_factor": share}, {"partial_rotary_factor": 1})
    fields: dict[str, Any] = {
        "vocab": whole(config, "vocab_size"),
        "hidden": hidden,
        "layers": whole(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": whole(config, "num_key_value_heads", heads),
        "head_size": head_size,
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary": 0 if share == 1 else int(head_size * share),
        "context": context,
        "tied": bool(config.get("tie_word_embeddings", False)),
    }
    if "intermediate" not in more:
        fields["intermediate"] = whole(config, "intermediate_size")
    return ModelConfig(**(fields | more))


def slots_of(
    shape: ModelConfig, layer: dict[str, str], embedding: str = "model.embed_tokens.weight"
) -> dict[str, WeightSlot]:
    """Official tensor names; `layer` maps our nouns to names behind `model.layers.N.`."""
    table = {
        embedding: WeightSlot("embedding.weight"),
        "model.norm.weight": WeightSlot("norm.weight"),
    }
    if not shape.tied:
        table["lm_head.weight"] = WeightSlot("head.weight")
    for i in range(shape.layers):
        names = {noun: f"model.layers.{i}.{name}" for noun, name in layer.items()}
        table |= layer_slots(shape, i, names)
    return table
