"""LoRA adapters (arXiv 2106.09685) in PEFT's form, added to the weights while they are read.

O rows and I columns of a weight, R the rank: `W + scale * B A`, A [R, I], B [O, R]; with DoRA
(arXiv 2402.09353) each row of that is brought to a length that was learned.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dinfer.errors import CheckpointError
from dinfer.loader.checkpoint import Checkpoint, quantization
from dinfer.loader.dequantize import dequantized
from dinfer.loader.safetensors import SafetensorsFiles
from dinfer.loader.stored_formats import is_ours
from dinfer.loader.torch_files import TorchFiles
from dinfer.loader.weights import Header, Pieces, Tensors, whole
from dinfer.nn.transformer import ModelConfig
from dinfer.nn.weight_map import WeightSlot
from dinfer.text.chat import ChatTemplate
from dinfer.text.tokenizer import Tokenizer, read_json

CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_WRAPPERS = re.compile(
    r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save(\.default)?(?=\.)"
)
"""What PEFT's own modules add to the names."""
_NAME = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(\.default)?(\.weight)?"
    r"|(?P<table>.+)\.(?P<side>lora_embedding_A|lora_embedding_B)(\.default)?"
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "lora_bias": (False,),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None,),
    "use_qalora": (False,),
    "velora_config": (None,),
}
"""Keys that change what is added to which weights, with the values that change nothing: other ways
to begin, such as PiSSA, change the base as well.
"""


@dataclass(frozen=True)
class Delta:
    """What is added to one weight. magnitude: lengths of the rows (DoRA)."""

    down_RI: Tensor
    up_OR: Tensor
    scale: float
    magnitude_O: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return len(self.up_OR), self.down_RI.shape[1]

    def added(self, piece: Tensor, rows: slice) -> Tensor:
        """Rows of the weight with this in them, float32."""
        merged = piece.float() + self.scale * (self.up_OR[rows] @ self.down_RI)
        if self.magnitude_O is not None:
            lengths = torch.linalg.vector_norm(merged, dim=1, keepdim=True)
            merged *= self.magnitude_O[rows, None] / lengths
        return merged


class Adapter:
    """The tensors of an adapter's folder, by the names of the weights that they change.

    Raises CheckpointError where it is none, or needs what is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder} is not a LoRA adapter: it holds no {CONFIG}.")
        self._config = read_json(folder / CONFIG)
        self._refuse()
        found: dict[str, dict[str, Tensor]] = {}
        self.replaced: dict[str, Tensor] = {}
        """Weights that were trained as a whole (PEFT's modules_to_save)."""
        for name, tensor in _tensors(folder):
            match = _NAME.fullmatch(name)
            if match is None:
                self.replaced[name] = tensor
            else:
                module, part = match["module"] or match["table"], match["part"] or match["side"]
                found.setdefault(module, {})[part] = tensor
        self.deltas = {f"{name}.weight": self._delta(name, x) for name, x in found.items()}
        if not self.deltas and not self.replaced:
            raise CheckpointError(f"The adapter {folder} holds no tensors.")

    def _refuse(self) -> None:
        kind = str(self._config.get("peft_type", "none"))
        if kind.upper() != "LORA":
            raise CheckpointError(
                f"{self.folder / CONFIG} has 'peft_type': {kind!r}; only 'LORA' is supported."
            )
        for key, allowed in _NEUTRAL.items():
            if key in self._config and self._config[key] not in allowed:
                raise CheckpointError(
                    f"{self.folder / CONFIG} has {key!r}: {self._config[key]!r}, which is not"
                    " supported."
                )

    def _delta(self, module: str, parts: dict[str, Tensor]) -> Delta:
        scale, magnitude = self._scale(module), parts.pop("lora_magnitude_vector", None)
        if set(parts) == {"lora_embedding_A", "lora_embedding_B"}:  # [R, V] and [D, R] for [V, D]
            if magnitude is not None:
                raise CheckpointError(
                    f"The adapter {self.folder} uses DoRA on the embedding {module}, which is not"
                    " supported."
                )
            down, up = parts["lora_embedding_B"].T, parts["lora_embedding_A"].T
        elif set(parts) == {"lora_A", "lora_B"}:
            down, up = parts["lora_A"], parts["lora_B"]
        else:
            held = ", ".join(sorted(parts))
            raise CheckpointError(
                f"The adapter {self.folder} holds only {held} of {module}; two matrices are needed."
            )
        if down.ndim != 2 or up.ndim != 2 or up.shape[1] != len(down):
            raise CheckpointError(
                f"The adapter {self.folder} holds {module} as {list(up.shape)} and"
                f" {list(down.shape)}, which cannot be multiplied."
            )
        return Delta(down.contiguous(), up.contiguous(), scale, magnitude)

    def _scale(self, module: str) -> float:
        """alpha / rank; / sqrt(rank) with rsLoRA (arXiv 2312.03732). Patterns name single modules,
        as PEFT matches them.
        """
        rank = _of_module(self._config.get("rank_pattern"), module, self._config.get("r"))
        alpha = _of_module(
            self._config.get("alpha_pattern"), module, self._config.get("lora_alpha")
        )
        for key, value in (("r", rank), ("lora_alpha", alpha)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise CheckpointError(
                    f"{self.folder / CONFIG} gives {key!r} as {value!r}; a positive number is"
                    " needed."
                )
        return float(alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank))


class Adapted:
    """A checkpoint with an adapter in its weights, which are then plain numbers."""

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        self.path = base.path

    def json(self, name: str) -> dict[str, Any]:
        """The base's, without what it says of how weights are stored."""
        hidden = ("quantization_config", "compression_config")
        found = self._base.json(name)
        return {} if name == "quantize_config.json" else _without(found, hidden)

    def slots(self, family: ModuleType, shape: ModelConfig) -> dict[str, WeightSlot]:
        """The base's."""
        return self._base.slots(family, shape)

    def tensors(self, unused: tuple[str, ...] = ()) -> "Merged":
        """The base's, with the adapter's in them."""
        held, settings = self._base.tensors(unused), quantization(self._base)
        plain = dequantized(held, settings) if settings and is_ours(settings) else held
        return Merged(plain, self._adapter)

    def tokenizer(self) -> Tokenizer | None:
        """The base's."""
        return self._base.tokenizer()

    def template(self) -> ChatTemplate | None:
        """The adapter's, where it brings one."""
        return ChatTemplate.load(self._adapter.folder) or self._base.template()


class Merged:
    """Tensors with an adapter added to some of them. Raises CheckpointError where it does not
    fit.
    """

    def __init__(self, base: Tensors, adapter: Adapter) -> None:
        self.where = base.where
        self._base = base
        changes: list[tuple[str, Delta | Tensor]] = [*adapter.deltas.items()]
        changes += adapter.replaced.items()
        places = {name: _place(name, base.headers) for name, _ in changes}
        if gone := sorted(name for name, place in places.items() if not place):
            raise CheckpointError(
                f"The adapter {adapter.folder} changes {len(gone)} weights that {base.where} does"
                f" not have: {', '.join(gone[:5])}{' ...' if len(gone) > 5 else ''}."
            )
        self._deltas = {places[name]: delta for name, delta in adapter.deltas.items()}
        self._replaced = {places[name]: tensor for name, tensor in adapter.replaced.items()}
        self.headers = dict(base.headers)
        for given, changed in changes:
            name = places[given]
            header = base.headers[name]
            if tuple(changed.shape) != header.shape:
                raise CheckpointError(
                    f"The adapter {adapter.folder} gives {name} the shape {list(changed.shape)};"
                    f" it is {list(header.shape)}."
                )
            self.headers[name] = Header(header.shape, torch.float32, header.bytes, header.file)

    def pieces(self, name: str) -> Pieces:
        """The tensor, some rows at a time."""
        for rows, piece in self._base.pieces(name):
            if name in self._replaced:  # a table that was changed is also saved as a whole
                piece = self._replaced[name][rows]
            if name in self._deltas:
                piece = self._deltas[name].added(piece, rows)
            yield rows, piece


def _tensors(folder: Path) -> list[tuple[str, Tensor]]:
    """All tensors of an adapter, as the model's own modules are called, as float32."""
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"The adapter {folder} holds no weights: none of {', '.join(_FILES)}."
        )
    kind = TorchFiles if file.suffix == ".bin" else SafetensorsFiles
    held = kind(folder, (), {file: []})
    return [(_WRAPPERS.sub("", name), whole(held, name).float()) for name in held.headers]


def _place(name: str, held: Mapping[str, Header]) -> str:
    """The tensor that an adapter calls so: of that name, or the only one that ends so (adapters of
    a model without its head lack a prefix); empty where there is none.
    """
    if name in held:
        return name
    ends = [other for other in held if other.endswith(f".{name}")]
    return ends[0] if len(ends) == 1 else ""


def _of_module(pattern: dict[str, Any] | None, module: str, default: Any) -> Any:
    """The value for a module: of the first key that is a regular expression for the end of its
    name, as PEFT reads them.
    """
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _without(config: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}
