"""What a model is read from: a folder in Hugging Face form, or one GGUF file."""

from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dinfer.errors import CheckpointError
from dinfer.loader.dequantize import dequantized
from dinfer.loader.files import weight_files
from dinfer.loader.safetensors import SafetensorsFiles
from dinfer.loader.stored_formats import is_ours
from dinfer.loader.torch_files import TorchFiles
from dinfer.loader.weights import Tensors
from dinfer.nn.transformer import ModelConfig
from dinfer.nn.weight_map import WeightSlot
from dinfer.text.chat import ChatTemplate
from dinfer.text.tokenizer import Tokenizer, read_json


class Checkpoint(Protocol):
    """A model's files. path: the folder, or the file that holds it all."""

    @property
    def path(self) -> Path:
        """Where it lies."""
        ...

    def json(self, name: str) -> dict[str, Any]:
        """The content of a file such as config.json; empty where there is none."""
        ...

    def slots(self, family: ModuleType, shape: ModelConfig) -> dict[str, WeightSlot]:
        """Where each tensor goes, by the names that it has here."""
        ...

    def tensors(self, unused: tuple[str, ...] = ()) -> Tensors:
        """The weights, without those whose names begin as `unused` says."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """None where it brings none: such a model takes and gives token ids alone."""
        ...

    def template(self) -> ChatTemplate | None:
        """None where it brings none."""
        ...


def quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """How the weights are stored, with `quant_method`; None = as plain numbers."""
    config = checkpoint.json("config.json")
    given = config.get("quantization_config") or config.get("compression_config")
    if given is None and (first := checkpoint.json("quantize_config.json")):  # AutoGPTQ's old form
        given = {"quant_method": "gptq"} | first
    return given if given is None or isinstance(given, dict) else {"quant_method": given}


class Folder:
    """A checkpoint in Hugging Face form. Raises CheckpointError where it holds no config.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} is no checkpoint: it holds no config.json.")

    def json(self, name: str) -> dict[str, Any]:
        """The content of a file of the folder; empty where there is none."""
        return read_json(self.path / name)

    def slots(self, family: ModuleType, shape: ModelConfig) -> dict[str, WeightSlot]:
        """The official names of the family."""
        slots: dict[str, WeightSlot] = family.slots(shape)
        return slots

    def tensors(self, unused: tuple[str, ...] = ()) -> Tensors:
        """Of the safetensors files, else of pytorch_model.bin; what others quantized appears as
        plain weights.
        """
        files = weight_files(self.path)
        pickled = next(iter(files)).suffix == ".bin"
        kind = TorchFiles if pickled else SafetensorsFiles
        held = kind(self.path, unused, files)
        settings = quantization(self)
        return held if settings is None or is_ours(settings) else dequantized(held, settings)

    def tokenizer(self) -> Tokenizer | None:
        """From tokenizer.json, or vocab.json with merges.txt."""
        if any((self.path / file).is_file() for file in ("tokenizer.json", "vocab.json")):
            return Tokenizer.load(self.path)
        return None

    def template(self) -> ChatTemplate | None:
        """From chat_template.jinja or tokenizer_config.json."""
        return ChatTemplate.load(self.path)
