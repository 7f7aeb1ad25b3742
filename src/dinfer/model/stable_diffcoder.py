"""Stable-DiffCoder (8B, ByteDance Seed): Llama layout, block-causal attention."""

from typing import Any

from dinfer.config import ids, refuse, whole
from dinfer.nn.hf_layout import ATTENTION, MLP, NORMS, shape_of, slots_of
from dinfer.nn.transformer import ModelConfig, Transformer
from dinfer.nn.weight_map import WeightSlot
from dinfer.step import ModelInfo

ARCHITECTURES = ("StableDiffcoderForCausalLM",)
Model = Transformer


def shape(config: dict[str, Any]) -> ModelConfig:
    """Sizes from the Llama-style keys of config.json."""
    refuse(config, {"attention_bias": False, "mlp_bias": False})
    return shape_of(config)


def facts(config: dict[str, Any]) -> ModelInfo:
    """Mask id, block length and threshold are the defaults of the released code; config.json holds
    none of them. Blocks are counted from position 0 of the whole sequence.
    """
    block = whole(config, "block_size", 4)
    return ModelInfo(
        mask_id=config.get("mask_token_id", 5),
        eos_ids=ids(config, "eos_token_id", 2),
        block_length=block,
        context=whole(config, "max_position_embeddings"),
        iteration=f"blockwise:length={block}:aligned=true",
        cache="block",
        decoder="threshold:threshold=0.95",
    )


def slots(shape: ModelConfig) -> dict[str, WeightSlot]:
    """Official tensor names (Llama layout)."""
    return slots_of(shape, ATTENTION | NORMS | MLP)
