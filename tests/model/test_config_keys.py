"""Every key of the official config classes: honoured, refused by name, or neutral.

The keys are those of the classes in the repositories of the checkpoints (configuration_*.py; for
Stable-DiffCoder and DiffusionGemma of transformers), and of the golden config files, which these
classes wrote. Each stands here with a value that is not the golden one.
"""

import json
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from dinfer.errors import CheckpointError

from ..conftest import GOLDEN

BASE = {
    "_name_or_path": "elsewhere",
    "architectures": ["Other"],  # it has chosen the family
    "attention_dropout": 0.5,
    "auto_map": {},
    "bos_token_id": 7,
    "chunk_size_feed_forward": 4,
    "dtype": "float16",  # of the files; --dtype decides
    "id2label": {"0": "a"},
    "initializer_range": 0.5,
    "is_encoder_decoder": False,
    "label2id": {"a": 0},
    "model_type": "other",
    "output_attentions": True,
    "output_hidden_states": True,
    "pad_token_id": 9,
    "problem_type": "x",
    "return_dict": False,
    "torch_dtype": "float16",
    "transformers_version": "9.0",
    "use_cache": "never",
}
"""Neutral in every family: bookkeeping, training, and what generation code of transformers does."""
ELSEWHERE = {
    "attn_logit_softcapping": 50.0,
    "clip_qkv": 8.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.5,
    "residual_multiplier": 0.5,
}
"""Of related stacks: refused in every family that does not have them."""
ROPE = {
    "rope_theta": 12345.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
}
SIZES = {
    "head_dim": 48,
    "hidden_size": 128,
    "intermediate_size": 96,
    "max_position_embeddings": 77,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 0.5,
    "tie_word_embeddings": True,
    "vocab_size": 99,
    "eos_token_id": 3,
    "mask_token_id": 4,
    **ROPE,
}
WINDOWS = {"sliding_window": 8, "max_window_layers": 1}  # use_sliding_window is false
SLIDING = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}
FULL = {"hidden_act": "gelu", "partial_rotary_factor": 0.5}


class Keys(NamedTuple):
    """Key -> a value that is not the golden one."""

    used: dict[str, Any]
    refused: dict[str, Any]
    neutral: dict[str, Any]


def without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


QWEN3_MOE = {
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "norm_topk_prob": False,
}
LLADA = Keys(
    used={
        "d_model": 128,
        "embedding_size": 400,
        "eos_token_id": 3,
        "mask_token_id": 4,
        "max_sequence_length": 77,
        "mlp_hidden_size": 96,
        "n_heads": 2,
        "n_kv_heads": 1,
        "n_layers": 2,
        "rms_norm_eps": 0.5,
        "weight_tying": True,
        **ROPE,
    },
    refused={
        "activation_type": "swiglu",
        "alibi": True,
        "attention_layer_norm": True,
        "bias_for_layer_norm": True,
        "block_group_size": 2,
        "block_type": "sequential",
        "include_bias": True,
        "include_qkv_bias": True,
        "input_emb_norm": True,
        "layer_norm_type": "default",
        "layer_norm_with_affine": False,
        "rope": False,
        "scale_logits": True,
    },
    neutral={
        "alibi_bias_max": 4.0,  # alibi is off
        "attention_layer_norm_with_affine": False,  # attention_layer_norm is off
        "embedding_dropout": 0.5,
        "flash_attention": True,
        "init_cutoff_factor": 3.0,
        "init_device": "cuda",
        "init_fn": "normal",
        "init_std": 0.5,
        "mlp_ratio": 2,  # mlp_hidden_size is given
        "multi_query_attention": True,  # n_kv_heads is given
        "precision": "fp32",
        "residual_dropout": 0.5,
        "rope_full_precision": False,  # ours are always turned in float32
        "train_max_sequence_length": 9,
        "vocab_size": 99,  # embedding_size is given
    },
)
TABLE = {
    "llada": LLADA,
    "llada_gqa": LLADA,
    "llada_moe": Keys(
        used=without(SIZES, "intermediate_size")
        | {
            "dense_intermediate_size": 64,
            "expert_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 1,
        },
        refused=FULL
        | {
            "attention_bias": True,
            "moe_layer_freq": [0, 1, 1],
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "qk_layernorm": False,
            "routed_scaling_factor": 2.0,
            "router_num_group": 2,
            "router_topk_group": 1,
            "shared_expert_intermediate_size": 64,
        },
        neutral={
            "norm_topk_prob": True,  # the official code sets it to false
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
    ),
    "llada2_moe": Keys(
        used=SIZES
        | {
            "block_length": 8,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 48,
            "moe_router_enable_expert_bias": False,
            "n_group": 8,
            "num_experts": 32,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "partial_rotary_factor": 0.25,
            "rotary_dim": 8,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
        refused={
            "hidden_act": "gelu",
            "norm_head": True,
            "norm_topk_prob": False,
            "score_function": "softmax",
            "use_bias": True,
            "use_qk_norm": False,
            "use_qkv_bias": True,
            "use_rmsnorm": False,
            "using_split_qkv_in_self_attention": True,
            **SLIDING,
        },
        neutral={
            "embedding_dropout": 0.5,
            "norm_softmax": True,  # in no line of the official code, nor is router_dtype
            "output_dropout": 0.5,
            "output_router_logits": True,
            "router_dtype": "bf16",
            **WINDOWS,
        },
    ),
    "dream": Keys(
        used=SIZES,
        refused=FULL | SLIDING | {"bd_size": 32},
        neutral=WINDOWS,
    ),
    "fast_dllm_v2": Keys(
        used=SIZES | {"bd_size": 8},
        refused=FULL | SLIDING,
        neutral=WINDOWS | {"conplemenrary_mask": False},  # so spelt; for training
    ),
    "sdar": Keys(
        used=SIZES | {"block_size": 8},
        refused=FULL | SLIDING | {"attention_bias": True},
        neutral=WINDOWS
        | {
            "debug": True,
            "ep_size": 2,
            "fuse_cross_entropy": False,
            "micro_forward": True,
            "skip_checkpoint": True,
            "use_deepep": True,
        },
    ),
    "sdar_moe": Keys(
        used=SIZES | QWEN3_MOE | {"block_size": 8},
        refused=FULL
        | SLIDING
        | {"attention_bias": True, "decoder_sparse_step": 2, "mlp_only_layers": [0]},
        neutral=WINDOWS
        | {
            "debug": True,
            "ep_size": 2,
            "fuse_cross_entropy": False,
            "micro_forward": True,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
            "skip_checkpoint": True,
            "use_deepep": True,
        },
    ),
    "stable_diffcoder": Keys(
        used=without(SIZES, "head_dim") | {"head_dim": 48, "block_size": 8},
        refused=FULL | SLIDING | {"attention_bias": True, "mlp_bias": True},
        neutral=WINDOWS | {"layer_norm_eps": 0.5, "pretraining_tp": 2},  # tp: rounding alone
    ),
}
PLAIN = {"head_dim": 32, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 160} | {
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 3,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": 320,
}  # fmt: skip
CASES = [
    (family, kind, key, value)
    for family, keys in TABLE.items()
    for kind, table in (
        ("used", keys.used),
        ("refused", keys.refused | ELSEWHERE),
        ("neutral", keys.neutral | BASE),
    )
    for key, value in table.items()
]


def config_of(family: str) -> dict[str, Any]:
    path = GOLDEN / family / "config.json"
    return json.loads(path.read_text()) if path.is_file() else dict(PLAIN)


def read(family: str, config: dict[str, Any]) -> tuple[Any, Any]:
    module = import_module(f"dinfer.model.{family.removesuffix('_gqa')}")
    return module.shape(config), module.facts(config)


@pytest.mark.parametrize("family", TABLE)
def test_no_key_of_the_official_file_is_left_out(family: str) -> None:
    keys = TABLE[family]
    listed = keys.used | keys.refused | keys.neutral | BASE | ELSEWHERE
    assert not config_of(family).keys() - listed.keys()


@pytest.mark.parametrize(("family", "kind", "key", "value"), CASES)
def test_a_key(family: str, kind: str, key: str, value: Any) -> None:
    golden = config_of(family)
    assert golden.get(key) != value, "the table must hold another value"
    if kind == "neutral":
        assert read(family, golden | {key: value}) == read(family, golden)
        return
    try:
        changed = read(family, golden | {key: value})
    except CheckpointError as error:  # a size that is used may contradict another
        assert kind == "used" or repr(key) in str(error)
        return
    assert kind == "used" and changed != read(family, golden)


# DiffusionGemma keeps most keys in an object of their own.

GEMMA = Keys(
    used={
        "eos_token_id": 3,
        "final_logit_softcapping": 5.0,
        "head_dim": 32,
        "hidden_size": 128,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "max_position_embeddings": 77,
        "moe_intermediate_size": 48,
        "num_attention_heads": 2,
        "num_experts": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "per_layer_config": {"2": {"head_dim": 16}},
        "rms_norm_eps": 0.5,
        "rope_parameters": {"sliding_attention": {"rope_theta": 5.0}},
        "sliding_window": 4,
        "top_k_experts": 1,
        "vocab_size": 99,
    },
    refused={
        "attention_bias": True,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "hidden_activation": "silu",
        "hidden_size_per_layer_input": 64,
        "num_kv_shared_layers": 1,
        "tie_word_embeddings": False,
        "use_bidirectional_attention": "all",
        "use_double_wide_mlp": True,
    },
    neutral={
        "attention_dropout": 0.5,
        "bos_token_id": 7,
        "initializer_range": 0.5,
        "model_type": "other",
        "pad_token_id": 9,
    },
)
GEMMA_TOP = Keys(
    used={"canvas_length": 8, "text_config": None},
    refused={"tie_word_embeddings": False},
    neutral={
        "boi_token_id": 7,  # images
        "eoi_token_id": 7,
        "image_token_id": 7,
        "vision_config": {},
        **{key: BASE[key] for key in ("architectures", "dtype", "initializer_range", "model_type")},
        "transformers_version": "9.0",
    },
)


@pytest.mark.parametrize(
    ("kind", "inside", "key", "value"),
    [
        (kind, inside, key, value)
        for inside, keys in ((True, GEMMA), (False, GEMMA_TOP))
        for kind, table in zip(Keys._fields, keys, strict=True)
        for key, value in table.items()
    ],
)
def test_a_key_of_diffusion_gemma(kind: str, inside: bool, key: str, value: Any) -> None:
    golden = config_of("diffusion_gemma")
    new = {key: value}
    config = golden | ({"text_config": golden["text_config"] | new} if inside else new)
    assert config != golden
    if kind == "neutral":
        assert read("diffusion_gemma", config) == read("diffusion_gemma", golden)
        return
    try:
        changed = read("diffusion_gemma", config)
    except CheckpointError as error:  # a size that is used may contradict another
        assert kind == "used" or repr(key) in str(error)
        return
    assert kind == "used" and changed != read("diffusion_gemma", golden)


def test_no_key_of_diffusion_gemma_is_left_out() -> None:
    golden = config_of("diffusion_gemma")
    for given, keys in ((golden["text_config"], GEMMA), (golden, GEMMA_TOP)):
        assert not given.keys() - (keys.used | keys.refused | keys.neutral).keys()


@pytest.mark.parametrize(
    "given",
    [
        {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}},
        {"full_attention": {"rope_type": "proportional", "factor": 2.0}},
        {"full_attention": {"rope_type": "proportional", "mscale": 2.0}},
        {"other_attention": {}},
    ],
)
def test_rotary_settings_that_diffusion_gemma_lacks(given: dict[str, Any]) -> None:
    golden = config_of("diffusion_gemma")
    config = golden | {"text_config": golden["text_config"] | {"rope_parameters": given}}
    with pytest.raises(CheckpointError, match=r"factor|yarn|mscale|other_attention"):
        read("diffusion_gemma", config)
