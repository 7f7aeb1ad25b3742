"""Dense SDAR (1.7B to 8B): Qwen3 layout, block-causal attention (arXiv 2510.06303)."""

from typing import Any

from dinfer.config import ids, refuse, whole
from dinfer.nn.hf_layout import ATTENTION, MLP, NORMS, QK_NORMS, shape_of, slots_of
from dinfer.nn.transformer import ModelConfig, Transformer
from dinfer.nn.weight_map import WeightSlot
from dinfer.step import ModelInfo

ARCHITECTURES = ("SDARForCausalLM",)
Model = Transformer


def shape(config: dict[str, Any]) -> ModelConfig:
    """Sizes from the Qwen3-style keys of config.json."""
    refuse(config, {"attention_bias": False})
    return shape_of(config, qk_norm=True, head_size=whole(config, "head_dim", 128))


def facts(config: dict[str, Any]) -> ModelInfo:
    """Blocks are counted from position 0 of the whole sequence. The released 4-token block is no
    key of old configs.
    """
    block = whole(config, "block_size", 4)
    return ModelInfo(
        mask_id=config.get("mask_token_id", 151669),
        eos_ids=ids(config, "eos_token_id", 151643),
        block_length=block,
        context=whole(config, "max_position_embeddings"),
        iteration=f"blockwise:length={block}:aligned=true",
        cache="block",
        decoder="threshold:threshold=0.9",
    )


def slots(shape: ModelConfig) -> dict[str, WeightSlot]:
    """Official tensor names (Qwen3 layout)."""
    return slots_of(shape, ATTENTION | QK_NORMS | NORMS | MLP)
