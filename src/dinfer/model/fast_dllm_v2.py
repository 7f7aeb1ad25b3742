"""Fast-dLLM v2 (1.5B, 7B): Qwen2.5 layout, block-causal, shifted logits (arXiv 2509.26328)."""

from typing import Any

from dinfer.config import ids, whole
from dinfer.model import dream
from dinfer.nn.transformer import Transformer
from dinfer.step import ModelInfo

ARCHITECTURES = ("Fast_dLLM_QwenForCausalLM",)
Model = Transformer
shape, slots = dream.shape, dream.slots


def facts(config: dict[str, Any]) -> ModelInfo:
    """Blocks of `bd_size`, decoded in sub-blocks of 8; the mask id is no key of the config. The
    block size is needed: it alone tells a config from that of Dream, which has the same tensors.
    """
    block = whole(config, "bd_size")
    return ModelInfo(
        mask_id=config.get("mask_token_id", 151665),
        eos_ids=ids(config, "eos_token_id", 151645),
        block_length=block,
        context=whole(config, "max_position_embeddings"),
        iteration=f"subblock:block={block}",
        cache="block",
        decoder="threshold:threshold=0.9:strict=true",
        shift=1,
    )
