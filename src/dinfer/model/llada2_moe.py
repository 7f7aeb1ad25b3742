"""LLaDA2.0 and 2.1 (mini, flash, CAP): block-causal, experts chosen by a biased grouped sigmoid
(arXiv 2512.15745).
"""

from typing import Any

from dinfer.config import ids, number, refuse, whole
from dinfer.errors import CheckpointError
from dinfer.nn.hf_layout import EXPERTS, MLP, NORMS, shape_of, slots_of
from dinfer.nn.moe import GroupedSigmoid, Mixture
from dinfer.nn.transformer import ModelConfig, Transformer
from dinfer.nn.weight_map import WeightSlot
from dinfer.step import ModelInfo

ARCHITECTURES = ("LLaDA2MoeModelLM",)
Model = Transformer


def shape(config: dict[str, Any]) -> ModelConfig:
    """Sizes from config.json, or the defaults of the official class; the rotary embedding turns
    only a part of each head's channels.
    """
    expected = {
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
        "norm_head": False,
        "using_split_qkv_in_self_attention": False,
    }
    refuse(config, expected)
    heads = whole(config, "num_attention_heads")
    wide, groups = whole(config, "moe_intermediate_size"), whole(config, "n_group", 8)
    mixture = Mixture(
        experts=whole(config, "num_experts"),
        intermediate=wide,
        routing=GroupedSigmoid(
            top=whole(config, "num_experts_per_tok"),
            groups=groups,
            kept=whole(config, "topk_group", min(4, groups)),
            scale=number(config, "routed_scaling_factor", 2.5),
        ),
        first=int(number(config, "first_k_dense_replace", 0)),
        shared=int(number(config, "num_shared_experts", 0)) * wide,
        biased=bool(config.get("moe_router_enable_expert_bias", True)),
    )
    found = shape_of(
        config,
        partial=0.5,
        kv_heads=whole(config, "num_key_value_heads")
        if config.get("num_key_value_heads")
        else heads,
        norm_eps=number(config, "rms_norm_eps", 1e-5),
        qk_norm=True,
        mixture=mixture,
    )
    turned = found.rotary or found.head_size
    if whole(config, "rotary_dim", turned) != turned:
        raise CheckpointError(
            f"config.json gives 'rotary_dim' as {config['rotary_dim']}, but"
            f" 'partial_rotary_factor' makes it {turned}; they must agree."
        )
    return found


def facts(config: dict[str, Any]) -> ModelInfo:
    """Block length and mask id are those of the released code and tokenizer; config.json holds
    neither.
    """
    block = whole(config, "block_length", 32)
    return ModelInfo(
        mask_id=config.get("mask_token_id", 156895),
        eos_ids=ids(config, "eos_token_id", 156892),
        block_length=block,
        context=whole(config, "max_position_embeddings"),
        iteration=f"blockwise:length={block}:aligned=true",
        cache="block",
        decoder="threshold:threshold=0.95:strict=true",
    )


_ATTENTION = {
    "qkv": "attention.query_key_value.weight",
    "out": "attention.dense.weight",
    "q_norm": "attention.query_layernorm.weight",
    "k_norm": "attention.key_layernorm.weight",
}
_SHARED = {f"shared_{x}": f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")}


def slots(shape: ModelConfig) -> dict[str, WeightSlot]:
    """Official tensor names; q, k and v lie in one tensor."""
    layer = _ATTENTION | NORMS | MLP | EXPERTS | _SHARED
    if shape.mixture and shape.mixture.biased:
        layer["router_bias"] = "mlp.gate.expert_bias"
    return slots_of(shape, layer, "model.word_embeddings.weight")
