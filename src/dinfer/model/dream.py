"""Dream (7B, Dream-Coder, DiffuCoder): Qwen2.5 layout, full attention, shifted logits
(arXiv 2508.15487).
"""

from typing import Any

from dinfer.config import ids, refuse, whole
from dinfer.nn.hf_layout import ATTENTION, MLP, NORMS, QKV_BIASES, shape_of, slots_of
from dinfer.nn.transformer import ModelConfig, Transformer
from dinfer.nn.weight_map import WeightSlot
from dinfer.step import ModelInfo

ARCHITECTURES = ("DreamModel",)
Model = Transformer


def shape(config: dict[str, Any]) -> ModelConfig:
    """Sizes from the Qwen2-style keys of config.json; q, k and v have biases."""
    return shape_of(config, qkv_bias=True)


def facts(config: dict[str, Any]) -> ModelInfo:
    """The chat end token comes from generation_config.json or the tokenizer, not from here. A block
    size tells Fast-dLLM v2, which has the same tensors, from this family.
    """
    refuse(config, {"bd_size": None})
    return ModelInfo(
        mask_id=config.get("mask_token_id", 151666),
        eos_ids=ids(config, "eos_token_id", 151643),
        block_length=None,
        context=whole(config, "max_position_embeddings"),
        iteration="blockwise:length=32",
        cache="vicinity:left=16:right=16",
        decoder="threshold:threshold=0.9",
        shift=1,
    )


def slots(shape: ModelConfig) -> dict[str, WeightSlot]:
    """Official tensor names (Qwen2 layout)."""
    return slots_of(shape, ATTENTION | QKV_BIASES | NORMS | MLP)
