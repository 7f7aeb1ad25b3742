"""What a model is read from: a folder in Hugging Face form, or one GGUF file."""

from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dinfer.errors import CheckpointError
from dinfer.loader.files import weight_files
from dinfer.loader.safetensors import SafetensorsFiles
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

    def tensors(self, unused: tuple[str, ...] = ()) -> SafetensorsFiles | TorchFiles:
        """Of the safetensors files, else of pytorch_model.bin."""
        files = weight_files(self.path)
        if next(iter(files)).suffix == ".bin":
            return TorchFiles(self.path, unused, files)
        return SafetensorsFiles(self.path, unused, files)

    def tokenizer(self) -> Tokenizer | None:
        """From tokenizer.json, or vocab.json with merges.txt."""
        if any((self.path / file).is_file() for file in ("tokenizer.json", "vocab.json")):
            return Tokenizer.load(self.path)
        return None

    def template(self) -> ChatTemplate | None:
        """From chat_template.jinja or tokenizer_config.json."""
        return ChatTemplate.load(self.path)
