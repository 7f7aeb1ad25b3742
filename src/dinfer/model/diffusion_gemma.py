"""DiffusionGemma (26B-A4B), its text part: Gemma 4's layers over causal text and an open canvas of
random tokens, which is denoised with self-conditioning (arXiv 2208.04202).

T rows, R open rows, D hidden, H query heads, K key/value heads, d head size, E experts.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dinfer.config import ids, number, refuse, whole
from dinfer.errors import CheckpointError
from dinfer.nn.attention import Attend
from dinfer.nn.linear import Linear
from dinfer.nn.mlp import GatedMLP
from dinfer.nn.moe import Experts, Mixture, Softmax
from dinfer.nn.norm import RMSNorm, unit
from dinfer.nn.rope import Rotary, rotary_table, rotate
from dinfer.nn.transformer import Shape, Transformer
from dinfer.nn.weights import Slot
from dinfer.step import Facts

ARCHITECTURES = ("DiffusionGemmaForBlockDiffusion",)
UNUSED = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
"""Beginnings of the names of tensors that text does not need."""

ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class GemmaShape(Shape):
    """Sizes; those of Shape are the sliding layers'.

    full: numbers of the layers with full attention, which have sizes and rotary rates of their own
    (full_turned: pairs of channels that are rotated) and no v: it is k before its norm. window:
    positions that a row of the other layers sees, its own among them. softcap: bound of the logits.
    """

    full: tuple[int, ...] = ()
    full_kv_heads: int = 0
    full_head_size: int = 0
    full_theta: float = 0.0
    full_turned: int = 0
    window: int = 0
    softcap: float = 0.0

    def kv_at(self, layer: int) -> tuple[int, int]:
        """Key/value heads of a layer, and their size."""
        if layer in self.full:
            return self.full_kv_heads, self.full_head_size
        return self.kv_heads, self.head_size

    def window_at(self, layer: int) -> int | None:
        """How many positions a row of a layer sees."""
        return None if layer in self.full else self.window

    def table(self, full: bool, positions_T: Tensor) -> Rotary:
        """cos and sin of rows, in the layers with full attention or the others."""
        if full:
            size, theta = self.full_head_size, self.full_theta
            return rotary_table(positions_T, size, theta, self.full_turned)
        return rotary_table(positions_T, self.head_size, self.rope_theta)


class Attention(nn.Module):
    """q, k and v with a norm each (v's has no weight); scores are not scaled."""

    def __init__(self, shape: GemmaShape, number: int) -> None:
        super().__init__()
        self.heads, self.eps = shape.heads, shape.norm_eps
        self.kv_heads, self.head_size = shape.kv_at(number)
        self.kv = 1 if number in shape.full else 2
        rows = (self.heads + self.kv * self.kv_heads) * self.head_size
        self.qkv = Linear(shape.hidden, rows)
        self.out = Linear(self.heads * self.head_size, shape.hidden)
        self.q_norm = RMSNorm(self.head_size, self.eps)
        self.k_norm = RMSNorm(self.head_size, self.eps)

    def forward(self, x_TD: Tensor, rotary: Rotary, layer: int, attend: Attend) -> Tensor:
        rows = self.qkv(x_TD).view(len(x_TD), -1, self.head_size)
        q, *kv = rows.split((self.heads, *[self.kv_heads] * self.kv), dim=1)
        # `attend` divides the scores by sqrt(d).
        q = rotate(self.q_norm(q), rotary) * self.head_size**0.5
        mixed = attend(layer, q, rotate(self.k_norm(kv[0]), rotary), unit(kv[-1], self.eps))
        out: Tensor = self.out(mixed.reshape(len(x_TD), -1))
        return out


class Router(nn.Module):
    """Chooses experts from `norm(x) * scale / sqrt(D)`, in float32; each expert's weight is scaled
    once more.
    """

    def __init__(self, shape: GemmaShape, mixture: Mixture) -> None:
        super().__init__()
        self.routing, self.eps = mixture.routing, shape.norm_eps
        experts, size = mixture.experts, shape.hidden
        self.weight = nn.Parameter(torch.empty(experts, size, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.expert_scale = nn.Parameter(torch.empty(experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        x = unit(x_TD.float(), self.eps) * self.scale * x_TD.shape[1] ** -0.5
        weights, chosen = self.routing(nn.functional.linear(x, self.weight), None)
        return weights * self.expert_scale[chosen], chosen


class Layer(nn.Module):
    """Attention, then a dense MLP and experts side by side, with norms before and behind each; the
    whole is scaled by a number that is another one for open rows than for text.
    """

    def __init__(self, shape: GemmaShape, number: int) -> None:
        super().__init__()
        assert shape.mixture is not None
        self.attention = Attention(shape, number)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate, ACTIVATION)
        self.router = Router(shape, shape.mixture)
        self.experts = Experts(shape.hidden, shape.mixture)
        self.norms = nn.ModuleDict({x: RMSNorm(shape.hidden, shape.norm_eps) for x in _NORMS})
        self.scalar = nn.Parameter(torch.empty(1))
        self.text_scalar = nn.Parameter(torch.empty(1))

    def forward(
        self, x_TD: Tensor, rotary: Rotary, layer: int, attend: Attend, open_T: Tensor
    ) -> Tensor:
        norms = self.norms
        mixed = self.attention(norms["attention"](x_TD), rotary, layer, attend)
        x_TD = x_TD + norms["attention_out"](mixed)
        dense = norms["mlp_out"](self.mlp(norms["mlp"](x_TD)))
        sparse = self.experts.mix(norms["experts"](x_TD), *self.router(x_TD))
        x_TD = x_TD + norms["out"](dense + norms["experts_out"](sparse))
        return x_TD * torch.where(open_T[:, None], self.scalar, self.text_scalar)


class Head(Linear):
    """Logits in float32, kept within `cap`: `cap * tanh(x / cap)`."""

    def __init__(self, shape: GemmaShape) -> None:
        super().__init__(shape.hidden, shape.vocab)
        self.cap = shape.softcap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * (super().forward(x).float() / self.cap).tanh()


class SelfConditioning(nn.Module):
    """`norm(x + mlp(norm(soft)))`, the second norm without a weight."""

    def __init__(self, shape: GemmaShape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate, ACTIVATION)

    def forward(self, x_RD: Tensor, soft_RD: Tensor) -> Tensor:
        return unit(x_RD + self.mlp(self.norm(soft_RD)), self.norm.eps)


class Model(Transformer):
    """The stack. The encoder of the released code is the same stack over text."""

    shape: GemmaShape

    def __init__(self, shape: GemmaShape) -> None:
        super().__init__(shape)
        self.head = Head(shape)
        self.head.weight = self.embedding.weight
        self.conditioning = SelfConditioning(shape)

    def layer(self, shape: GemmaShape, number: int) -> nn.Module:
        """A layer of the stack."""
        return Layer(shape, number)

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Scaled embeddings [T, D], the inputs of text."""
        return self._scaled(self.embedding(tokens_T))

    def condition(self, x_RD: Tensor, soft_RD: Tensor) -> Tensor:
        """Inputs of open rows, from what `embed` gives and the mean embeddings (not scaled) under
        the probabilities of the step before; 0 in a first step.
        """
        out: Tensor = self.conditioning(x_RD, self._scaled(soft_RD))
        return out

    def _scaled(self, x: Tensor) -> Tensor:
        # The factor is rounded to the weights' dtype, as in training.
        return x * torch.tensor(self.shape.hidden**0.5).to(x)

    def forward(
        self, x_TD: Tensor, positions_T: Tensor, attend: Attend, open_T: Tensor | None = None
    ) -> Tensor:
        """Normed hidden rows; open_T [T] bool: which rows are open (None = all)."""
        if open_T is None:
            open_T = torch.ones_like(positions_T, dtype=torch.bool)
        sliding, full = (self.shape.table(kind, positions_T) for kind in (False, True))
        for number, layer in enumerate(self.layers):
            rotary = full if number in self.shape.full else sliding
            x_TD = layer(x_TD, rotary, number, attend, open_T)
        out: Tensor = self.norm(x_TD)
        return out


def shape(config: dict[str, Any]) -> GemmaShape:
    """Sizes from `text_config`; settings that the stack does not have are refused."""
    refuse(config, {"tie_word_embeddings": True})
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError("config.json has no 'text_config', which this family needs.")
    expected = {"attention_bias": False, "hidden_activation": ACTIVATION}
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
    return GemmaShape(
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
    refuse(sliding, {"rope_type": "default", "partial_rotary_factor": 1.0, "factor": 1.0})
    refuse(full, {"rope_type": "proportional", "factor": 1.0})
    return sliding, full


def facts(config: dict[str, Any]) -> Facts:
    """A canvas of `canvas_length` random tokens follows the prompt, or the canvas before it."""
    length = whole(config, "canvas_length", 256)
    text = config["text_config"]
    return Facts(
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


def tuned(facts: Facts, generation: dict[str, Any]) -> Facts:
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


def slots(shape: GemmaShape) -> dict[str, Slot]:
    """Official tensor names; the file holds the weights that text and canvas share once."""
    decoder = "model.decoder."
    table = {
        decoder + "embed_tokens.weight": Slot("embedding.weight"),
        decoder + "norm.weight": Slot("norm.weight"),
        decoder + "self_conditioning.pre_norm.weight": Slot("conditioning.norm.weight"),
    }
    table |= _mlp_slots(decoder + "self_conditioning.", "conditioning.mlp.", shape.intermediate)
    for i in range(shape.layers):
        scalar = f"model.encoder.language_model.layers.{i}.layer_scalar"
        table |= _layer_slots(shape, i, f"{decoder}layers.{i}.")
        table[scalar] = Slot(f"layers.{i}.text_scalar")
    return table


def _layer_slots(shape: GemmaShape, number: int, official: str) -> dict[str, Slot]:
    ours, (kv_heads, size) = f"layers.{number}.", shape.kv_at(number)
    q, kv = shape.heads * size, kv_heads * size
    rows = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    if number in shape.full:
        del rows["v"]
    table = {
        f"{official}self_attn.{x}_proj.weight": Slot(f"{ours}attention.qkv.weight", part)
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
    table |= {official + theirs: Slot(ours + name) for theirs, name in names.items()}
    return table | _mlp_slots(official + "mlp.", ours + "mlp.", shape.intermediate)


def _mlp_slots(official: str, ours: str, wide: int) -> dict[str, Slot]:
    return {
        f"{official}gate_proj.weight": Slot(ours + "gate_up.weight", (0, wide)),
        f"{official}up_proj.weight": Slot(ours + "gate_up.weight", (wide, 2 * wide)),
        f"{official}down_proj.weight": Slot(ours + "down.weight"),
    }
