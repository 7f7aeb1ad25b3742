"""GGUF files of dense LLaDA, LLaDA-MoE and Dream, as llama.cpp's converter writes them
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); read with the package `gguf`.
"""

import math
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from dinfer.errors import CheckpointError
from dinfer.loader.weights import Header, Pieces, row_ranges
from dinfer.nn.transformer import ModelConfig
from dinfer.nn.weight_map import WeightSlot, layer_slots
from dinfer.registry import near
from dinfer.text.chat import ChatTemplate
from dinfer.text.gguf import end_ids, special_ids, template_of, tokenizer_of
from dinfer.text.tokenizer import Tokenizer, refuse_pointer

_QWEN_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "expert_intermediate_size": "expert_feed_forward_length",
}
_LLADA_KEYS = {
    "n_layers": "block_count",
    "d_model": "embedding_length",
    "mlp_hidden_size": "feed_forward_length",
    "n_heads": "attention.head_count",
    "n_kv_heads": "attention.head_count_kv",
    "max_sequence_length": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


_SCALING = {
    "rope_type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "finetuned": "finetuned",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
"""Key of `rope_scaling` -> key of the file behind `rope.scaling.`."""
_SCALING_KEYS = (*_SCALING.values(), "attn_factor")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (False,),
    "attention.sliding_window": (0,),
    "expert_gating_func": (0, 1),  # 1 is the softmax
    "expert_shared_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
}
"""Keys behind the architecture's name with the values that change nothing. Other keys and values
are refused: llama.cpp has settings that change numbers, and this is how they are not overlooked.
"""
_UNREAD = ("vocab_size", "tensor_data_layout")  # the embedding's shape and the form say it


class _Form(NamedTuple):
    """How an architecture is written. keys: key of config.json -> key of the file. paired: rows of
    q and k are reordered so that channels that rotate together are neighbours. shift: of logits.
    """

    architecture: str
    keys: dict[str, str]
    paired: bool = False
    shift: bool = False


_FORMS = {
    "llada": _Form("LLaDAModelLM", _LLADA_KEYS, paired=True),
    "llada-moe": _Form("LLaDAMoEModelLM", _QWEN_KEYS),
    "dream": _Form("DreamModel", _QWEN_KEYS, shift=True),
}
_LAYER = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "out": "attn_output.weight",
    "attention_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "router": "ffn_gate_inp.weight",
    **{f"expert_{noun}": f"ffn_{noun}_exps.{{}}.weight" for noun in ("gate", "up", "down")},
}
"""`{}`: the number of an expert, whose weights lie in one tensor [experts, rows, columns]."""
_QK_NORMS = {x: f"attn_{x}.weight" for x in ("q_norm", "k_norm")}
_BIASES = {f"{x}_bias": f"attn_{x}.bias" for x in "qkv"}


class GGUF:
    """A file as a checkpoint. Raises CheckpointError where it is none that is supported, and where
    the package `gguf` is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self.metadata = {name: field.contents() for name, field in self._reader.fields.items()}
        given = str(self.metadata.get("general.architecture"))
        if given not in _FORMS:
            raise CheckpointError(
                f"{path} holds the architecture {given!r}, which is not supported."
                f"{near(given, sorted(_FORMS))}"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"{path} is one of {self.metadata['split.count']} parts; join them first"
                " (llama-gguf-split --merge)."
            )
        self._prefix, self._form = given, _FORMS[given]

    def json(self, name: str) -> dict[str, Any]:
        """What config.json and generation_config.json would say."""
        if name == "generation_config.json":
            return {"eos_token_id": end_ids(self.metadata)}
        return self._config if name == "config.json" else {}

    @cached_property
    def _config(self) -> dict[str, Any]:
        keys = {ours: f"{self._prefix}.{theirs}" for ours, theirs in self._form.keys.items()}
        found = {ours: self.metadata[key] for ours, key in keys.items() if key in self.metadata}
        names = {tensor.name: tensor.shape for tensor in self._reader.tensors}
        if "token_embd.weight" in names:
            found["vocab_size"] = int(names["token_embd.weight"][1])
        tied = "output.weight" not in names
        found |= {"tie_word_embeddings": tied, "weight_tying": tied}
        known = special_ids(self.metadata)
        named = {"mask_token_id": "mask", "eos_token_id": "eos"}
        found |= {key: known[role] for key, role in named.items() if role in known}
        found["rope_scaling"] = self._scaling()
        self._refuse_others({*keys.values(), *(self._key(f"scaling.{x}") for x in _SCALING_KEYS)})
        return found | {"architectures": [self._form.architecture]}

    def _key(self, name: str) -> str:
        return f"{self._prefix}.rope.{name}"

    def _scaling(self) -> dict[str, Any] | None:
        """The file's `rope_scaling` as config.json would say it."""
        read = self.metadata.get
        given = {ours: read(self._key(f"scaling.{theirs}")) for ours, theirs in _SCALING.items()}
        given = {key: value for key, value in given.items() if value is not None}
        factor = float(given.get("factor") or 0)
        if factor == 0 or given.get("rope_type") == "none":
            return None
        kind = given.setdefault("rope_type", "linear")
        attention = read(self._key("scaling.attn_factor"), 1.0)
        if kind == "yarn":  # llama.cpp multiplies what the paper says, transformers replaces it
            given["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
        elif attention != 1.0:
            raise self._unsupported("rope.scaling.attn_factor", attention)
        else:
            kept = ("rope_type", "factor", "finetuned")
            given = {key: value for key, value in given.items() if key in kept}
        return given

    def _refuse_others(self, used: set[str]) -> None:
        """Raises CheckpointError for a key of the architecture that is neither used nor neutral."""
        lead = f"{self._prefix}."
        heads = self.metadata.get(f"{lead}attention.head_count") or 1
        size = self.metadata.get(f"{lead}embedding_length", 0) // heads
        size = self.metadata.get(f"{lead}attention.key_length", size)
        same = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        neutral = _NEUTRAL | dict.fromkeys(same, (size,))
        for key, value in self.metadata.items():
            name = key.removeprefix(lead)
            if name == key or key in used or name in _UNREAD:
                continue
            if value not in neutral.get(name, ()):
                raise self._unsupported(name, value)
        shift = self.metadata.get("diffusion.shift_logits", self._form.shift)
        if bool(shift) != self._form.shift:
            raise CheckpointError(
                f"{self.path} has 'diffusion.shift_logits': {shift!r}; only {self._form.shift} is"
                f" supported for the architecture {self._prefix!r}."
            )

    def _unsupported(self, name: str, value: Any) -> CheckpointError:
        given = f"{self.path} has '{self._prefix}.{name}': {value!r}"
        return CheckpointError(f"{given}, which is not supported.")

    def slots(self, family: ModuleType, shape: ModelConfig) -> dict[str, WeightSlot]:
        """Where each tensor goes, by its name in the file."""
        table = {
            "token_embd.weight": WeightSlot("embedding.weight"),
            "output_norm.weight": WeightSlot("norm.weight"),
        }
        if not shape.tied:
            table["output.weight"] = WeightSlot("head.weight")
        layer = _LAYER | (_QK_NORMS if shape.qk_norm else {}) | (_BIASES if shape.qkv_bias else {})
        for i in range(shape.layers):
            names = {noun: f"blk.{i}.{name}" for noun, name in layer.items()}
            table |= layer_slots(shape, i, names)
        return table

    def tensors(self, unused: tuple[str, ...] = ()) -> "Blocks":
        """The weights, in full precision."""
        heads = self.metadata.get(f"{self._prefix}.attention.head_count", 1)
        kv_heads = self.metadata.get(f"{self._prefix}.attention.head_count_kv", heads)
        paired = {"attn_q.": heads, "attn_k.": kv_heads} if self._form.paired else {}
        return Blocks(self.path, self._reader.tensors, paired)

    def tokenizer(self) -> Tokenizer | None:
        """From the metadata."""
        return tokenizer_of(self.metadata, self.path)

    def template(self) -> ChatTemplate | None:
        """From the metadata."""
        return template_of(self.metadata)


class _Part(NamedTuple):
    """Rows of a tensor, each `width` bytes, from `start` in the file on. heads: of the rows, where
    their channels are paired; 0 = they are not.
    """

    start: int
    width: int
    kind: Any
    heads: int


class Blocks:
    """The tensors of a GGUF file; experts one by one. paired: part of a name -> heads of it."""

    def __init__(self, path: Path, tensors: list[Any], paired: dict[str, int]) -> None:
        self.where = path
        self.headers: dict[str, Header] = {}
        self._parts: dict[str, _Part] = {}
        for tensor in sorted(tensors, key=lambda tensor: tensor.data_offset):
            shape = tuple(int(size) for size in reversed(tensor.shape))
            heads = next((n for part, n in paired.items() if part in tensor.name), 0)
            experts = len(shape) == 3
            many = shape[0] if experts else 1
            stored, shape = int(tensor.n_bytes) // many, shape[-2:]
            width = stored // (shape[0] if len(shape) == 2 else 1)
            for number in range(many):
                name = tensor.name
                if experts:
                    name = name.replace("_exps.", f"_exps.{number}.")
                self.headers[name] = Header(shape, torch.float32, stored, path)
                start = int(tensor.data_offset) + number * stored
                self._parts[name] = _Part(start, width, tensor.tensor_type, heads)

    def pieces(self, name: str) -> Pieces:
        """The tensor, some rows at a time, as float32."""
        from gguf import quants

        shape, (start, width, kind, heads) = self.headers[name].shape, self._parts[name]
        size = shape[0] // heads if heads else 1
        with self.where.open("rb") as file:
            file.seek(start)
            for rows in row_ranges(shape, size):
                count = len(range(*rows.indices(shape[0]))) if len(shape) == 2 else 1
                stored = np.fromfile(file, np.uint8, count * width).reshape(count, width)
                try:
                    values = quants.dequantize(stored, kind)
                except NotImplementedError as error:
                    raise CheckpointError(
                        f"{name} in {self.where} is stored as {kind.name}, which is not supported."
                    ) from error
                piece = torch.from_numpy(values.astype(np.float32, copy=False))
                yield rows, _halves(piece, size) if heads else piece.view(-1, *shape[1:])


def _halves(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of heads of `size` channels from neighbours that rotate together to two halves, as the
    official files have them.
    """
    return rows.view(-1, size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            f"{path} needs the package gguf; install it with `pip install dinfer[gguf]`."
        ) from error
    try:
        refuse_pointer(path)
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} is no readable GGUF file: {error}.") from error
