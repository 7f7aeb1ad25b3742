"""LLaDA-MoE (7B-A1B): full bidirectional attention, experts that are not fused in the file.

Its config says `model_type: llada` as dense LLaDA's does; `architectures` tells them apart.
"""

from typing import Any

from dinfer.config import ids, number, refuse, whole
from dinfer.errors import CheckpointError
from dinfer.nn.hf_layout import ATTENTION, EXPERTS, NORMS, QK_NORMS, shape_of, slots_of
from dinfer.nn.moe import Mixture, Softmax
from dinfer.nn.transformer import ModelConfig, Transformer
from dinfer.nn.weight_map import WeightSlot
from dinfer.step import ModelInfo

ARCHITECTURES = ("LLaDAMoEModelLM", "LLaDAMoEModel")
Model = Transformer


def shape(config: dict[str, Any]) -> ModelConfig:
    """Sizes from config.json. The official code never rescales the weights of the chosen experts,
    whatever `norm_topk_prob` says.
    """
    expected = {
        "attention_bias": False,
        "qk_layernorm": True,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "shared_expert_intermediate_size": None,
        "router_num_group": None,
        "router_topk_group": None,
        "routed_scaling_factor": 1,
    }
    refuse(config, expected)
    layers = whole(config, "num_hidden_layers")
    if config.get("moe_layer_freq", [1] * layers) not in (1, [1] * layers):
        raise CheckpointError(
            f"config.json gives 'moe_layer_freq' as {config['moe_layer_freq']!r};"
            f" only experts in all {layers} layers are supported."
        )
    routing = Softmax(top=whole(config, "num_experts_per_tok"), normalised=False)
    wide = whole(config, "expert_intermediate_size")
    return shape_of(
        config,
        intermediate=whole(config, "dense_intermediate_size", wide),
        norm_eps=number(config, "rms_norm_eps", 1e-5),
        qk_norm=True,
        mixture=Mixture(whole(config, "num_experts"), wide, routing),
    )


def facts(config: dict[str, Any]) -> ModelInfo:
    """The mask id is that of the released tokenizer; config.json does not hold it."""
    return ModelInfo(
        mask_id=config.get("mask_token_id", 156895),
        eos_ids=ids(config, "eos_token_id", 156892),
        block_length=None,
        context=whole(config, "max_position_embeddings"),
        iteration="blockwise:length=32",
        cache="vicinity:left=16:right=16",
        decoder="threshold:threshold=0.9",
    )


def slots(shape: ModelConfig) -> dict[str, WeightSlot]:
    """Official tensor names."""
    return slots_of(shape, ATTENTION | QK_NORMS | NORMS | EXPERTS)
