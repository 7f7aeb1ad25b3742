"""DiffusionGemma (26B-A4B), its text part: causal text, then one canvas of random tokens after the
other, each denoised as a whole.
"""

from dataclasses import replace
from typing import Any

from dinfer.config import ids, number, refuse, whole
from dinfer.errors import CheckpointError
from dinfer.nn.gemma import ACTIVATION, Gemma, GemmaConfig
from dinfer.nn.moe import Mixture, Softmax
from dinfer.nn.weight_map import WeightSlot
from dinfer.step import ModelInfo

ARCHITECTURES = ("DiffusionGemmaForBlockDiffusion",)
UNUSED = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
"""Beginnings of the names of tensors that text does not need."""

Model = Gemma
_GEMMA4 = {
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
"""Settings of Gemma 4 that this model does not vary."""


def shape(config: dict[str, Any]) -> GemmaConfig:
    """Sizes from `text_config`; settings that the stack does not have are refused."""
    refuse(config, {"tie_word_embeddings": True})
    text = _text_config(config)
    expected = {"attention_bias": False, "hidden_activation": ACTIVATION, **_GEMMA4}
    refuse(text, expected | {"tie_word_embeddings": True, "use_bidirectional_attention": "vision"})
    mixture = Mixture(
        experts=whole(text, "num_experts"),
        intermediate=whole(text, "moe_intermediate_size"),
        routing=Softmax(top=whole(text, "top_k_experts"), normalised=True),
        activation=ACTIVATION,
    )
    layers = whole(text, "num_hidden_layers")
    full = _full_layers(text, layers)
    kv_heads, head_size = whole(text, "num_key_value_heads"), whole(text, "head_dim", 256)
    sizes = _full_sizes(text, full)
    full_size = whole(sizes, "head_dim", head_size)
    sliding, wide = _rotary(text)
    return GemmaConfig(
        vocab=whole(text, "vocab_size"),
        hidden=whole(text, "hidden_size"),
        layers=layers,
        heads=whole(text, "num_attention_heads"),
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate=whole(text, "intermediate_size"),
        norm_eps=number(text, "rms_norm_eps", 1e-6),
        rope_theta=number(sliding, "rope_theta", 1e4),
        context=whole(text, "max_position_embeddings"),
        qk_norm=True,
        tied=True,
        mixture=mixture,
        full=full,
        full_kv_heads=whole(sizes, "num_key_value_heads", kv_heads),
        full_head_size=full_size,
        full_theta=number(wide, "rope_theta", 1e6),
        full_turned=int(number(wide, "partial_rotary_factor", 1.0) * full_size // 2),
        window=whole(text, "sliding_window"),
        softcap=number(text, "final_logit_softcapping", 30.0),
    )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json has no 'text_config', which this family needs.")
    return text


def _full_layers(text: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Every sixth layer, unless the config lists them; the last in any case."""
    kinds = text.get("layer_types")
    if kinds is None:
        return tuple(i for i in range(layers) if i % 6 == 5 or i == layers - 1)
    known = ("sliding_attention", "full_attention")
    if len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"config.json gives 'layer_types' as {kinds!r}; {layers} of {' or '.join(known)} are"
            " needed."
        )
    return tuple(i for i in range(layers) if kinds[i] == known[1] or i == layers - 1)


def _full_sizes(text: dict[str, Any], full: tuple[int, ...]) -> dict[str, Any]:
    """Sizes of the layers with full attention, which the config spells in one of two ways."""
    given = text.get("per_layer_config")
    if given is None:
        spelled = {
            "head_dim": "global_head_dim",
            "num_key_value_heads": "num_global_key_value_heads",
        }
        return {"head_dim": 512} | {x: text[key] for x, key in spelled.items() if text.get(key)}
    sizes: dict[str, Any] = given.get(str(full[0]), {})
    if given != {str(i): sizes for i in full} or sizes.keys() - {"head_dim", "num_key_value_heads"}:
        raise CheckpointError(
            f"config.json gives 'per_layer_config' as {given!r}; only the same head_dim and"
            f" num_key_value_heads for each of the layers {list(full)} are supported."
        )
    return sizes


def _rotary(text: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of the sliding and the full layers."""
    given = text.get("rope_parameters") or {}
    sliding = given.get("sliding_attention", {})
    full = given.get("full_attention", {"partial_rotary_factor": 0.25})
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
    for kind, one in given.items():
        if kind not in ("sliding_attention", "full_attention") or one.keys() - known:
            raise CheckpointError(
                f"config.json has {kind!r}: {one!r} in 'rope_parameters', which is not supported."
            )
    refuse(sliding, {"rope_type": "default", "partial_rotary_factor": 1.0, "factor": 1.0})
    refuse(full, {"rope_type": "proportional", "factor": 1.0})
    return sliding, full


def facts(config: dict[str, Any]) -> ModelInfo:
    """A canvas of `canvas_length` random tokens follows the prompt, or the canvas before it."""
    length = whole(config, "canvas_length", 256)
    text = _text_config(config)
    return ModelInfo(
        mask_id=None,
        eos_ids=ids(text, "eos_token_id", 1),
        block_length=length,
        context=whole(text, "max_position_embeddings"),
        iteration=f"blockwise:length={length}",
        cache="block",
        decoder="renoise",
        causal=True,
    )


_DECODER = {
    "steps": "max_denoising_steps",
    "t_min": "t_min",
    "t_max": "t_max",
    "stable": "stability_threshold",
    "entropy": "confidence_threshold",
}


def tuned(facts: ModelInfo, generation: dict[str, Any]) -> ModelInfo:
    """The facts with the sampler's settings that generation_config.json gives."""
    given = {option: generation.get(key) for option, key in _DECODER.items()}
    given["bound"] = (generation.get("sampler_config") or {}).get("entropy_bound")
    options = [f"{option}={value}" for option, value in given.items() if value is not None]
    return replace(facts, decoder=":".join([facts.decoder, *options]))


_NORMS = {
    "attention": "input_layernorm",
    "attention_out": "post_attention_layernorm",
    "mlp": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm_1",
    "experts": "pre_feedforward_layernorm_2",
    "experts_out": "post_feedforward_layernorm_2",
    "out": "post_feedforward_layernorm",
}


def slots(shape: GemmaConfig) -> dict[str, WeightSlot]:
    """Official tensor names; the file holds the weights that text and canvas share once."""
    decoder = "model.decoder."
    table = {
        decoder + "embed_tokens.weight": WeightSlot("embedding.weight"),
        decoder + "norm.weight": WeightSlot("norm.weight"),
        decoder + "self_conditioning.pre_norm.weight": WeightSlot("conditioning.norm.weight"),
    }
    table |= _mlp_slots(decoder + "self_conditioning.", "conditioning.mlp.", shape.intermediate)
    for i in range(shape.layers):
        scalar = f"model.encoder.language_model.layers.{i}.layer_scalar"
        table |= _layer_slots(shape, i, f"{decoder}layers.{i}.")
        table[scalar] = WeightSlot(f"layers.{i}.text_scalar")
    return table


def _layer_slots(shape: GemmaConfig, number: int, official: str) -> dict[str, WeightSlot]:
    ours, (kv_heads, size) = f"layers.{number}.", shape.kv_at(number)
    q, kv = shape.heads * size, kv_heads * size
    rows = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    if number in shape.full:
        del rows["v"]
    table = {
        f"{official}self_attn.{x}_proj.weight": WeightSlot(f"{ours}attention.qkv.weight", part)
        for x, part in rows.items()
    }
    names = {
        "self_attn.o_proj.weight": "attention.out.weight",
        "self_attn.q_norm.weight": "attention.q_norm.weight",
        "self_attn.k_norm.weight": "attention.k_norm.weight",
        "router.proj.weight": "router.weight",
        "router.scale": "router.scale",
        "router.per_expert_scale": "router.expert_scale",
        "experts.gate_up_proj": "experts.gate_up.weight",
        "experts.down_proj": "experts.down.weight",
        "layer_scalar": "scalar",
    }
    names |= {f"{theirs}.weight": f"norms.{x}.weight" for x, theirs in _NORMS.items()}
    table |= {official + theirs: WeightSlot(ours + name) for theirs, name in names.items()}
    return table | _mlp_slots(official + "mlp.", ours + "mlp.", shape.intermediate)


def _mlp_slots(official: str, ours: str, wide: int) -> dict[str, WeightSlot]:
    return {
        f"{official}gate_proj.weight": WeightSlot(ours + "gate_up.weight", (0, wide)),
        f"{official}up_proj.weight": WeightSlot(ours + "gate_up.weight", (wide, 2 * wide)),
        f"{official}down_proj.weight": WeightSlot(ours + "down.weight"),
    }
