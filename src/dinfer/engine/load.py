"""From a name to a model: bundled, a local folder in Hugging Face form, a GGUF file, or a hub id.
Never runs remote code.
"""

import dataclasses
import logging
import os
import time
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dinfer.engine.checkpoint import Checkpoint, Folder
from dinfer.engine.gguf import GGUF
from dinfer.engine.weights import load_weights, places
from dinfer.errors import CheckpointError, DinferError, RequestError, UnknownName
from dinfer.nn import quantised
from dinfer.nn.packed import Packed, packs
from dinfer.nn.transformer import Shape, Transformer
from dinfer.registry import build, names, near
from dinfer.step import Facts
from dinfer.text.chat import ChatTemplate
from dinfer.text.tokenizer import Tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TEXTS = ["*.json", "*.jinja", "merges.txt"]
WANTED = [*TEXTS, "*.safetensors"]
_KINDS = "no bundled name, folder, GGUF file or hub id (owner/name)"
log = logging.getLogger("dinfer")
_WANTED = {
    "mask_id": "a token id, a whole number, or null where there is no mask token",
    "eos_ids": "a list of token ids",
    "block_length": "a whole number of 1 or more, or null for full attention",
    "context": "a whole number of 1 or more",
    "iteration": "a spec string",
    "cache": "a spec string",
    "decoder": "a spec string",
    "chat_only": "true or false",
    "shift": "0 or 1",
    "causal": "true or false",
}


@dataclass(frozen=True)
class Reading:
    """Bytes of weights that were read from files, and the seconds that reading, converting and
    quantising took.
    """

    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds

    def __str__(self) -> str:
        """For people."""
        mib, rate = self.bytes / 2**20, self.rate / 1e6
        return f"{mib:.1f} MiB of weights read in {self.seconds:.1f} s ({rate:.0f} MB/s)"


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, with what its folder or file says of it; read: None where its weights
    come from nowhere.
    """

    name: str
    folder: Path
    family: str
    model: Transformer
    facts: Facts
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    read: Reading | None = None


def bundled() -> list[str]:
    """Names of the models that come with the package."""
    folder = files("dinfer") / "assets"
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(entry.name for entry in entries if (entry / "config.json").is_file())


def locate(name: str) -> Path:
    """The folder or GGUF file of a bundled name, a local path or a hub id (`owner/name`, downloaded
    if there is a network).
    """
    if name in bundled():
        return Path(str(files("dinfer") / "assets" / name))
    if os.path.exists(name):  # unlike Path.exists, False for a name that is too long
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UnknownName(f"Unknown model {name!r}: {_KINDS}.{near(name, bundled())}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except HFValidationError as error:
        raise UnknownName(f"Unknown model {name!r}: {_KINDS}.{near(name, bundled())}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name!r} is no folder here and could not be fetched from the hub"
            f" ({type(error).__name__}); check the name and the network,"
            " or download it elsewhere and give the folder's path."
        ) from error


def open_checkpoint(name: str) -> Checkpoint:
    """The files of what `locate` finds. Raises CheckpointError where they are none of ours."""
    path = locate(name)
    return Folder(path) if path.is_dir() else GGUF(path)


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
    family: ModuleType,
    checkpoint: Checkpoint,
    overrides: dict[str, Any],
    ends: frozenset[int] = frozenset(),
) -> Facts:
    """Facts from config.json, generation_config.json, dinfer.json (ours, optional), then
    `overrides`. ends: ids that end an answer by the tokenizer and the chat template.
    """
    facts: Facts = family.facts(checkpoint.json("config.json"))
    generation = checkpoint.json("generation_config.json")
    eos = generation.get("eos_token_id")
    more = eos if isinstance(eos, list) else [] if eos is None else [eos]
    facts = dataclasses.replace(facts, eos_ids=facts.eos_ids.union(more, ends))
    facts = family.tuned(facts, generation) if hasattr(family, "tuned") else facts
    eos_ids = _fact("eos_ids", facts.eos_ids - {None})  # null is common where there is none
    facts = dataclasses.replace(facts, mask_id=_fact("mask_id", facts.mask_id), eos_ids=eos_ids)
    allowed = [field.name for field in dataclasses.fields(Facts)]
    for source in (checkpoint.json("dinfer.json"), overrides):
        for key, value in source.items():
            if key not in allowed:
                raise RequestError(f"Unknown fact {key!r}.{near(key, allowed)}")
            facts = dataclasses.replace(facts, **{key: _fact(key, value)})
    if "block_length" in overrides and "iteration" not in overrides and facts.block_length:
        base = "" if facts.causal else ":aligned=true"
        facts = dataclasses.replace(facts, iteration=f"blockwise:length={facts.block_length}{base}")
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
    if key == "shift":
        fits = fits and value in (0, 1)
    if not fits:
        raise RequestError(f"The fact {key!r} is {value!r}; it must be {_WANTED[key]}.")
    return value


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


def blank(
    family: ModuleType, shape: Shape, dtype: torch.dtype, quant: str | None = None
) -> Transformer:
    """A model without memory (on the meta device); quant: spec of the scheme of its layers."""
    # What must stay in float32 says so itself.
    with torch.device("meta"), default_dtype(dtype):
        model: Transformer = family.Model(shape)
        if quant is not None:
            quantised.prepare(model, build("quant", quant))
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors are of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def empty(
    family: ModuleType, shape: Shape, dtype: torch.dtype, device: torch.device, quant: str | None
) -> Transformer:
    """A model with room for its weights, to be filled and then sealed. Plain ones are laid out for
    the device; what `quant` leaves plain is not, as a second copy of the head would be needed.
    """
    model = blank(family, shape, dtype, quant)
    if quant is None and packs(device, dtype):
        with torch.device("meta"), default_dtype(dtype):
            quantised.prepare(model, Packed())
    model = model.to_empty(device=device)
    if shape.tied:
        model.head.weight = model.embedding.weight
    return model


def stored_quant(config: dict[str, Any]) -> str | None:
    """The scheme that a checkpoint is stored in; None = plain weights. Raises CheckpointError for
    the schemes of others.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    if method != "dinfer":
        raise CheckpointError(
            f"config.json says that the weights are quantised by {method!r}; only plain"
            " floating-point weights and those that `dinfer quantize` wrote are supported."
        )
    return str(given.get("scheme"))


def _quant(config: dict[str, Any], asked: str | None) -> str | None:
    stored = stored_quant(config)
    if stored and asked and build("quant", stored) != build("quant", asked):
        raise RequestError(
            f"quant is {asked!r} and this checkpoint is stored as {stored!r}; leave it out, or give"
            " the unquantised checkpoint."
        )
    return asked or stored


def load(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    facts: dict[str, Any] | None = None,
    quant: str | None = None,
) -> Loaded:
    """Loads a model with its facts, tokenizer and chat template; quant: spec of a scheme to store
    its layers in, one tensor after another. Raises DinferError with one clear sentence.
    """
    checkpoint = open_checkpoint(name)
    config = checkpoint.json("config.json")
    family = family_of(config)
    place = resolve_device(device)
    kind = resolve_dtype(dtype, config, place)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.template()
    ends = template.end_ids(tokenizer) if tokenizer and template else frozenset()
    known = facts_of(family, checkpoint, facts or {}, ends)
    shape = family.shape(config)
    model = empty(family, shape, kind, place, _quant(config, quant))
    read = _read(model, checkpoint, family)
    quantised.seal(model)
    model.requires_grad_(False).eval()
    if known.causal and known.block_length is None:
        raise RequestError("The fact 'block_length' is None; a causal model needs one.")
    if known.mask_id is None and not model.conditioned:
        raise DinferError("The files give no mask id, which this family needs; add one as a fact.")
    if known.mask_id is not None and not 0 <= known.mask_id < shape.vocab:
        raise DinferError(
            f"The mask id {known.mask_id} is no row of the embedding, which has {shape.vocab}."
        )
    log.info("%s: %s", name, read)
    return Loaded(
        name,
        checkpoint.path,
        family.__name__.rpartition(".")[2],
        model,
        known,
        tokenizer,
        template,
        read,
    )


def unused(family: ModuleType) -> tuple[str, ...]:
    """How the names of tensors begin that the family has no use for."""
    found: tuple[str, ...] = getattr(family, "UNUSED", ())
    return found


def _read(model: Transformer, checkpoint: Checkpoint, family: ModuleType) -> Reading:
    """Fills the model from the checkpoint."""
    coded = stored_quant(checkpoint.json("config.json")) is not None
    start, tensors = time.perf_counter(), checkpoint.tensors(unused(family))
    slots = checkpoint.slots(family, model.shape)
    load_weights(places(model, slots, coded), tensors)
    size = sum(header.bytes for header in tensors.headers.values())
    return Reading(size, time.perf_counter() - start)
