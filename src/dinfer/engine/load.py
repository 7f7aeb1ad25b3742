"""From a name to a model: bundled, a local folder in Hugging Face form, or a hub id. Never runs
remote code.
"""

import dataclasses
import json
import os
import typing
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dinfer.errors import CheckpointError, DinferError, RequestError, UnknownName
from dinfer.nn.transformer import Transformer
from dinfer.nn.weights import Slot
from dinfer.registry import names, near
from dinfer.step import Facts
from dinfer.text.chat import ChatTemplate
from dinfer.text.tokenizer import Tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WANTED = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
_WANTED = {
    "mask_id": "a token id, a whole number",
    "eos_ids": "a list of token ids",
    "block_length": "a whole number of 1 or more, or null for full attention",
    "context": "a whole number of 1 or more",
    "iteration": "a spec string",
    "cache": "a spec string",
    "decoder": "a spec string",
    "chat_only": "true or false",
}


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, with what its folder says of it."""

    name: str
    folder: Path
    family: str
    model: Transformer
    facts: Facts
    tokenizer: Tokenizer | None
    template: ChatTemplate | None


def bundled() -> list[str]:
    """Names of the models that come with the package."""
    folder = files("dinfer") / "assets"
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(entry.name for entry in entries if (entry / "config.json").is_file())


def locate(name: str) -> Path:
    """The folder of a bundled name, a local path or a hub id (`owner/name`, downloaded if there is
    a network).
    """
    if name in bundled():
        return Path(str(files("dinfer") / "assets" / name))
    if os.path.isdir(name):  # unlike Path.is_dir, False for a name that is too long
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UnknownName(
            f"Unknown model {name!r}: no bundled name, folder or hub id (owner/name)."
            f"{near(name, bundled())}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except HFValidationError as error:
        raise UnknownName(
            f"Unknown model {name!r}: no bundled name, folder or hub id (owner/name)."
            f"{near(name, bundled())}"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name!r} is no folder here and could not be fetched from the hub"
            f" ({type(error).__name__}); check the name and the network,"
            " or download it elsewhere and give the folder's path."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} in {path.parent} cannot be read as JSON: {error}."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name} in {path.parent} holds no JSON object.")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises CheckpointError where the folder has none."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no checkpoint: it holds no config.json.")
    return read_json(folder / "config.json")


def family_of(config: dict[str, Any]) -> ModuleType:
    """The family's module, by `architectures[0]`: two families share `model_type: llada`."""
    listed = config.get("architectures")
    given = str(listed[0]) if isinstance(listed, list) and listed else None
    known: dict[str, ModuleType] = {}
    for name in names("model"):
        module = import_module(f"dinfer.model.{name}")
        known |= dict.fromkeys(module.ARCHITECTURES, module)
    if given not in known:
        raise CheckpointError(
            f"config.json names the architecture {given or 'none'!r}, which is not supported."
            f"{near(str(given), sorted(known))}"
        )
    return known[given]


def facts_of(
    family: ModuleType, folder: Path, config: dict[str, Any], overrides: dict[str, Any]
) -> Facts:
    """Facts from config.json, generation_config.json, dinfer.json (ours, optional), then
    `overrides`.
    """
    facts: Facts = family.facts(config)
    if (folder / "generation_config.json").is_file():
        eos = read_json(folder / "generation_config.json").get("eos_token_id")
        more = eos if isinstance(eos, list) else [] if eos is None else [eos]
        facts = dataclasses.replace(facts, eos_ids=facts.eos_ids.union(more))
    eos_ids = _fact("eos_ids", facts.eos_ids - {None})  # null is common where there is none
    facts = dataclasses.replace(facts, mask_id=_fact("mask_id", facts.mask_id), eos_ids=eos_ids)
    ours = read_json(folder / "dinfer.json") if (folder / "dinfer.json").is_file() else {}
    allowed = [field.name for field in dataclasses.fields(Facts)]
    for source in (ours, overrides):
        for key, value in source.items():
            if key not in allowed:
                raise RequestError(f"Unknown fact {key!r}.{near(key, allowed)}")
            facts = dataclasses.replace(facts, **{key: _fact(key, value)})
    if "block_length" in overrides and "iteration" not in overrides and facts.block_length:
        facts = dataclasses.replace(
            facts, iteration=f"blockwise:length={facts.block_length}:aligned=true"
        )
    return facts


def _fact(key: str, value: Any) -> Any:
    """The value of a fact in its own type. Raises RequestError for another."""
    hint = typing.get_type_hints(Facts)[key]
    if hint == frozenset[int]:
        fits = isinstance(value, list | tuple | set | frozenset)
        fits = fits and all(type(t) is int and t >= 0 for t in value)
        value = frozenset(value) if fits else value
    else:
        fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if key in ("block_length", "context") and isinstance(value, int):
        fits = fits and value >= 1
    if not fits:
        raise RequestError(f"The fact {key!r} is {value!r}; it must be {_WANTED[key]}.")
    return value


def shards(folder: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it, from the index or the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise CheckpointError(
                f"{index.name} in {folder} holds no weight_map of tensor names to files."
            )
        return {name: folder / file for name, file in table.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(
            f"{folder} holds no model.safetensors and no model.safetensors.index.json."
        )
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} in {path.parent} is no readable safetensors file: {error}."
        ) from error


def load_weights(model: Transformer, slots: dict[str, Slot], folder: Path) -> None:
    """Streams every tensor into its place, one at a time. Names what is missing, unexpected or of
    a wrong shape.
    """
    where = shards(folder)
    missing, unexpected = sorted(set(slots) - set(where)), sorted(set(where) - set(slots))
    if missing or unexpected:
        parts = [f"missing: {', '.join(missing)}"] * bool(missing)
        parts += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
        raise CheckpointError(
            f"The tensors in {folder} are not those of this family; {'; '.join(parts)}."
        )
    places = dict(model.named_parameters())
    for path in sorted(set(where.values())):
        with _open(path) as file:
            for name in (n for n, p in where.items() if p == path):
                _copy(name, _read(file, name, path), places[slots[name].parameter], slots[name])


def _read(file: Any, name: str, path: Path) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path.name} in {path.parent} does not hold {name}: {error}."
        ) from error
    return tensor


def _copy(name: str, tensor: torch.Tensor, parameter: torch.Tensor, slot: Slot) -> None:
    target = parameter.data if slot.rows is None else parameter.data[slot.rows[0] : slot.rows[1]]
    if target.shape != tensor.shape:
        raise CheckpointError(
            f"{name} has the shape {list(tensor.shape)}; config.json asks for {list(target.shape)}."
        )
    if not tensor.is_floating_point():
        raise CheckpointError(
            f"{name} holds {tensor.dtype}; only floating-point weights are supported."
        )
    target.copy_(tensor)


def resolve_dtype(dtype: str, config: dict[str, Any], device: torch.device) -> torch.dtype:
    """`auto` = the checkpoint's own on a GPU; on a CPU bfloat16 where it has units for that, else
    float32 (emulated bfloat16 is slow).
    """
    if dtype == "auto":
        if device.type == "cpu":
            able = torch.cpu.get_capabilities()
            units = able.get("amx_bf16", False) or able.get("avx512_bf16", False)
            return torch.bfloat16 if units else torch.float32
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype not in DTYPES:
        raise RequestError(f"Unknown dtype {dtype!r}.{near(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def resolve_device(device: str) -> torch.device:
    """`auto` = cuda where it is there, else cpu."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    unknown = f"Unknown device {device!r}; use auto, cpu, cuda or cuda:N."
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise RequestError(unknown) from error
    if found.type not in ("cpu", "cuda"):
        raise RequestError(unknown)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(
            f"The device {device!r} was asked for and this machine offers no CUDA; use cpu."
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"The device {device!r} was asked for and this machine has"
            f" {torch.cuda.device_count()} CUDA devices, counted from 0."
        )
    return found


def load(
    name: str, dtype: str = "auto", device: str = "auto", facts: dict[str, Any] | None = None
) -> Loaded:
    """Loads a model with its facts, tokenizer and chat template. Raises DinferError with one clear
    sentence.
    """
    folder = locate(name)
    config = read_config(folder)
    family = family_of(config)
    place = resolve_device(device)
    kind = resolve_dtype(dtype, config, place)
    known = facts_of(family, folder, config, facts or {})
    shape = family.shape(config)
    with torch.device("meta"):
        model: Transformer = family.Model(shape)
    model = model.to(kind).to_empty(device=place)
    if shape.tied:
        model.head.weight = model.embedding.weight
    load_weights(model, family.slots(shape), folder)
    model.requires_grad_(False).eval()
    if not 0 <= known.mask_id < shape.vocab:
        raise DinferError(
            f"The mask id {known.mask_id} is no row of the embedding, which has {shape.vocab}."
        )
    tokenizer = _tokenizer(folder)
    return Loaded(
        name,
        folder,
        family.__name__.rpartition(".")[2],
        model,
        known,
        tokenizer,
        ChatTemplate.load(folder),
    )


def _tokenizer(folder: Path) -> Tokenizer | None:
    """None where the folder brings none: such a model takes and gives token ids alone."""
    if any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json")):
        return Tokenizer.load(folder)
    return None
