"""The bundled models: their config.json in the official form of their family, and how each is
trained.
"""

from dataclasses import dataclass, replace
from typing import Any

VOCAB, EOS_ID, MASK_ID, START_ID, END_ID = 832, 0, 1, 2, 3
CONTEXT = 512
BLOCK = 32


@dataclass(frozen=True)
class Recipe:
    """What `dinfer train NAME` makes. `steps` batches; each has so many `math`, `brief` and `drill`
    examples (and so on: the tasks of `corpus.DRAW`), and `own` ones of the user's where there are
    any.
    """

    config: dict[str, Any]
    generation: dict[str, Any]
    facts: dict[str, Any]
    steps: int
    block_causal: bool
    math: int = 32
    brief: int = 32
    drill: int = 16
    words: int = 0
    tables: int = 0
    sums: int = 0
    own: int = 16
    muon_lr: float = 0.02
    adam_lr: float = 0.003

    @property
    def parts(self) -> dict[str, int]:
        """Examples of a batch by task, for the tasks that it has."""
        names = ("math", "brief", "words", "tables", "drill", "sums")
        return {name: size for name in names if (size := getattr(self, name))}

    @property
    def tasks(self) -> list[str]:
        """The tasks that the model learns, without mere drills."""
        return [name for name in self.parts if name not in ("drill", "sums")]


_GENERATION = {"eos_token_id": [EOS_ID, END_ID], "pad_token_id": EOS_ID}

RECIPES = {
    "tiny-sdar": Recipe(
        config={
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "attention_bias": False,
            "block_size": BLOCK,
            "bos_token_id": EOS_ID,
            "eos_token_id": EOS_ID,
            "mask_token_id": MASK_ID,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 256,
            "intermediate_size": 640,
            "max_position_embeddings": CONTEXT,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": VOCAB,
        },
        generation=_GENERATION,
        facts={
            "chat_only": True,
            "iteration": "blockwise:length=8:aligned=true",
            "cache": "vicinity:left=0:right=0:reopen=false",
            "decoder": "threshold:threshold=0.98",
        },
        steps=2000,
        block_causal=True,
    ),
    "tiny-llada": Recipe(
        config={
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "activation_type": "silu",
            "alibi": False,
            "attention_layer_norm": False,
            "block_group_size": 1,
            "block_type": "llama",
            "d_model": 256,
            "embedding_size": VOCAB,
            "eos_token_id": EOS_ID,
            "include_bias": False,
            "include_qkv_bias": False,
            "input_emb_norm": False,
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "mask_token_id": MASK_ID,
            "max_sequence_length": CONTEXT,
            "mlp_hidden_size": 640,
            "mlp_ratio": 4,
            "n_heads": 4,
            "n_kv_heads": 4,
            "n_layers": 4,
            "pad_token_id": EOS_ID,
            "rms_norm_eps": 1e-6,
            "rope": True,
            "rope_full_precision": True,
            "rope_theta": 10000.0,
            "scale_logits": False,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCAB,
            "weight_tying": False,
        },
        generation=_GENERATION,
        facts={
            "chat_only": True,
            "iteration": "pruned:length=8:ahead=0:last=false",
            "cache": "vicinity:left=0:right=0:reopen=false",
            "decoder": "threshold:threshold=0.98",
        },
        steps=1500,
        block_causal=False,
        math=64,
        brief=16,
        muon_lr=0.01,
        adam_lr=0.0015,
    ),
}

_SDAR = RECIPES["tiny-sdar"]
RECIPES["tiny-words"] = replace(
    _SDAR,
    config={**_SDAR.config, "num_hidden_layers": 6, "vocab_size": 2048},
    steps=1500,
    math=4,
    brief=4,
    drill=0,
    words=48,
    tables=16,
    sums=4,
)
