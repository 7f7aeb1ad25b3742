"""SDAR with experts (30B-A3B): the Qwen3-MoE layout, otherwise as dense SDAR (arXiv 2510.06303)."""

from typing import Any

from dinfer.config import refuse, whole
from dinfer.model import sdar
from dinfer.nn.hf_layout import ATTENTION, EXPERTS, NORMS, QK_NORMS, shape_of, slots_of
from dinfer.nn.moe import Mixture, Softmax
from dinfer.nn.transformer import ModelConfig, Transformer
from dinfer.nn.weight_map import WeightSlot

ARCHITECTURES = ("SDARMoeForCausalLM",)
Model = Transformer
facts = sdar.facts


def shape(config: dict[str, Any]) -> ModelConfig:
    """Sizes from the Qwen3-MoE-style keys of config.json; every layer has experts."""
    refuse(config, {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []})
    routing = Softmax(
        top=whole(config, "num_experts_per_tok"),
        normalised=bool(config.get("norm_topk_prob", False)),
    )
    wide = whole(config, "moe_intermediate_size")
    mixture = Mixture(whole(config, "num_experts"), wide, routing)
    return shape_of(config, qk_norm=True, head_size=whole(config, "head_dim", 128), mixture=mixture)


def slots(shape: ModelConfig) -> dict[str, WeightSlot]:
    """Official tensor names (Qwen3-MoE layout)."""
    return slots_of(shape, ATTENTION | QK_NORMS | NORMS | EXPERTS)
