"""What a model is read from: a folder in Hugging Face form, or one GGUF file."""

from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dinfer.engine.shards import Shards
from dinfer.engine.weights import Tensors
from dinfer.errors import CheckpointError
from dinfer.nn.transformer import Shape
from dinfer.nn.weights import Slot
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

    def slots(self, family: ModuleType, shape: Shape) -> dict[str, Slot]:
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

    def slots(self, family: ModuleType, shape: Shape) -> dict[str, Slot]:
        """The official names of the family."""
        slots: dict[str, Slot] = family.slots(shape)
        return slots

    def tensors(self, unused: tuple[str, ...] = ()) -> Shards:
        """Of the safetensors files."""
        return Shards(self.path, unused)

    def tokenizer(self) -> Tokenizer | None:
        """From tokenizer.json, or vocab.json with merges.txt."""
        if any((self.path / file).is_file() for file in ("tokenizer.json", "vocab.json")):
            return Tokenizer.load(self.path)
        return None

    def template(self) -> ChatTemplate | None:
        """From chat_template.jinja or tokenizer_config.json."""
        return ChatTemplate.load(self.path)
