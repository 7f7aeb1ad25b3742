"""From a name to a model: bundled, a local folder in Hugging Face form, a GGUF file, or a hub id.
Never runs remote code.
"""

import logging
import os
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dinfer.errors import CheckpointError, DinferError, RequestError, UnknownName
from dinfer.loader.checkpoint import Checkpoint, Folder, quantization
from dinfer.loader.gguf import GGUF
from dinfer.loader.lora import Adapted, Adapter
from dinfer.loader.model_info import facts_of
from dinfer.loader.stored_formats import is_ours
from dinfer.loader.weights import Tensors, check, load_weights, places, same
from dinfer.native.products import PrepackedScheme
from dinfer.nn import quantized
from dinfer.nn.linear import Linear
from dinfer.nn.packed import Packed, packs
from dinfer.nn.transformer import ModelConfig, Transformer
from dinfer.quant.int4 import Int4
from dinfer.quant.int8 import Int8
from dinfer.registry import build, names, near
from dinfer.runner.native_cpu import supports
from dinfer.step import ModelInfo
from dinfer.text.chat import ChatTemplate
from dinfer.text.tokenizer import Tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TEXTS = ["*.json", "*.jinja", "merges.txt"]
WANTED = [*TEXTS, "*.safetensors"]
PICKLED = ["*.bin"]
_KINDS = "no bundled name, folder, GGUF file or hub id (owner/name)"
log = logging.getLogger("dinfer")


@dataclass(frozen=True)
class Reading:
    """Bytes of weights that were read from files, and the seconds that reading, converting,
    quantizing and laying out took.
    """

    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds

    def __str__(self) -> str:
        """For people."""
        unit, name = (1e9, "GB") if self.bytes >= 1e9 else (1e6, "MB")
        size, rate = self.bytes / unit, self.rate / unit
        return f"{size:.2f} {name} of weights read in {self.seconds:.1f} s ({rate:.2f} {name}/s)"


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, with what its folder or file says of it; read: None where its weights
    come from nowhere.
    """

    name: str
    folder: Path
    family: str
    model: Transformer
    facts: ModelInfo
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
        folder = Path(snapshot_download(name, allow_patterns=WANTED))
        if not any(folder.glob("*.safetensors")):  # an old checkpoint
            snapshot_download(name, allow_patterns=PICKLED)
        return folder
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


def adapted(checkpoint: Checkpoint, lora: str) -> Adapted:
    """The checkpoint with the adapter (folder or hub id) added to its weights."""
    if not isinstance(checkpoint, Folder):
        raise RequestError(
            f"lora is {lora!r} and {checkpoint.path} is one file, whose tensors have other names;"
            " give the folder of the original checkpoint."
        )
    return Adapted(checkpoint, Adapter(locate(lora)))


def family_of(config: dict[str, Any]) -> ModuleType:
    """The family's module, by `architectures[0]`: two families share `model_type: llada`."""
    given, known = _architecture(config), _architectures()
    if given not in known:
        raise CheckpointError(
            f"config.json names the architecture {given!r}, which is not supported; if it"
            " is a supported one under another name, say which family it is of."
            f"{near(given, sorted(known))}"
        )
    return import_module(f"dinfer.model.{known[given]}")


def _architecture(config: dict[str, Any]) -> str:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else "none"


def _architectures() -> dict[str, str]:
    """Architecture -> name of its family."""
    modules = {name: import_module(f"dinfer.model.{name}") for name in names("model")}
    return {given: name for name, module in modules.items() for given in module.ARCHITECTURES}


def choose_family(checkpoint: Checkpoint, asked: str | None = None) -> ModuleType:
    """The family called `asked`, or that of the architecture.

    Raises UnknownName for a name that no family has, and CheckpointError, which names the first
    key or tensors that do not fit, for a checkpoint that is of another family.
    """
    config = checkpoint.json("config.json")
    if asked is None:
        return family_of(config)
    if asked not in names("model"):
        raise UnknownName(f"Unknown family {asked!r}.{near(asked, names('model'))}")
    family = import_module(f"dinfer.model.{asked}")
    stored = stored_quant(checkpoint)
    try:
        family.facts(config)
        shape, tensors = fit(family, checkpoint)
        slots = checkpoint.slots(family, shape)
        model = blank(family, shape, torch.float32, stored)
        check(places(model, slots, coded=stored is not None), tensors)
    except CheckpointError as error:
        given = _architecture(config)
        other = _architectures().get(given)
        of = "no known family" if other is None else f"the family {other!r}"
        why = textwrap.shorten(str(error), 600, placeholder=" ...")  # thousands of tensors
        raise CheckpointError(
            f"The family {asked!r} was asked for and does not fit a checkpoint whose architecture"
            f" {given!r} is of {of}: {why}"
        ) from error
    return family


def resolve_dtype(dtype: str, config: dict[str, Any], device: torch.device) -> torch.dtype:
    """`auto` = the checkpoint's own on a GPU; on a CPU bfloat16 where it has instructions for that,
    else float32 (emulated bfloat16 is slow, and a warning says so when it is asked for).
    """
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        native = capabilities.get("amx_bf16", False) or capabilities.get("avx512_bf16", False)
        if dtype == "auto":
            return torch.bfloat16 if native else torch.float32
        if dtype == "float16" or (dtype == "bfloat16" and not native):
            log.warning("This CPU computes %s slowly; float32 is likely to be faster.", dtype)
    if dtype == "auto":
        dtype = _stored_dtype(config)
    if dtype not in DTYPES:
        raise RequestError(f"Unknown dtype {dtype!r}.{near(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def _stored_dtype(config: dict[str, Any]) -> str:
    """What the config says of the weights' type, in the spellings of transformers 4 and 5."""
    places = (config, config.get("text_config") or {})
    found = (place.get(key) for place in places for key in ("torch_dtype", "dtype"))
    dtype = str(next(filter(None, found), "bfloat16")).removeprefix("torch.")
    return "float32" if dtype == "float64" else dtype


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
    family: ModuleType,
    shape: ModelConfig,
    dtype: torch.dtype,
    scheme: str | quantized.Scheme | None = None,
) -> Transformer:
    """A model without memory (on the meta device); scheme: how its layers are stored, or the spec
    of that.
    """
    # What must stay in float32 says so itself.
    with torch.device("meta"), default_dtype(dtype):
        model: Transformer = family.Model(shape)
        if scheme is not None:
            known = build("quant", scheme) if isinstance(scheme, str) else scheme
            quantized.prepare(model, known)
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
    family: ModuleType,
    shape: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quant: str | None,
    compiled: bool | None = None,
) -> Transformer:
    """A model with memory for its weights, to be filled and then finalized. Plain weights are
    prepacked for the device; those that `quant` leaves plain are not. compiled: False = not
    for the native kernels, even where they support the model.
    """
    scheme: quantized.Scheme | None = build("quant", quant) if quant is not None else None
    stored = Packed() if scheme is None else scheme
    on_cpu = device.type == "cpu"
    if compiled is not False and on_cpu and supports(family.Model, shape, dtype, stored):
        # A plain head would take longer to read than all that int4 leaves of the layers.
        scheme = PrepackedScheme(stored, Int8() if isinstance(stored, Int4) else None)
    elif scheme is None and packs(device, dtype):
        scheme = stored
    model = blank(family, shape, dtype, scheme).to_empty(device=device)
    if shape.tied and isinstance(model.head, Linear):
        model.head.weight = model.embedding.weight
    return model


def stored_quant(checkpoint: Checkpoint) -> str | None:
    """The scheme whose codes a checkpoint holds and that is run as it is; None = other weights."""
    settings = quantization(checkpoint)
    return str(settings.get("scheme")) if settings and is_ours(settings) else None


def _quant(checkpoint: Checkpoint, asked: str | None) -> str | None:
    stored = stored_quant(checkpoint)
    if stored and asked and build("quant", stored) != build("quant", asked):
        raise RequestError(
            f"quant is {asked!r} and this checkpoint is stored as {stored!r}; leave it out, or give"
            " the unquantized checkpoint."
        )
    return asked or stored


def load(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    facts: dict[str, Any] | None = None,
    quant: str | None = None,
    family: str | None = None,
    compiled: bool | None = None,
    lora: str | None = None,
) -> Loaded:
    """Loads a model with its facts, tokenizer and chat template; quant: spec of a scheme to store
    its layers in, one tensor after another; family: its name, whatever the architecture says;
    compiled: as for the engine; lora: folder or hub id of an adapter to add to the weights.
    Raises DinferError with one clear sentence.
    """
    checkpoint = open_checkpoint(name)
    quant = _quant(checkpoint, quant)
    checkpoint = checkpoint if lora is None else adapted(checkpoint, lora)
    config = checkpoint.json("config.json")
    module = choose_family(checkpoint, family)
    place = resolve_device(device)
    kind = resolve_dtype(dtype, config, place)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.template()
    ends = template.end_ids(tokenizer) if tokenizer and template else frozenset()
    shape, tensors = fit(module, checkpoint)
    known = facts_of(module, checkpoint, facts or {}, ends)
    _fits_rotary(known, shape)
    model = empty(module, shape, kind, place, quant, compiled)
    read = _read(model, checkpoint, module, tensors)
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
        module.__name__.rpartition(".")[2],
        model,
        known,
        tokenizer,
        template,
        read,
    )


def _fits_rotary(facts: ModelInfo, shape: ModelConfig) -> None:
    scaling = shape.rope_scaling
    if scaling and scaling.kind == "dynamic" and facts.context > scaling.original:
        raise RequestError(
            f"The fact 'context' is {facts.context}; the rotary embedding is scaled as 'dynamic',"
            f" which is supported up to the {scaling.original} positions of the config."
        )


def unused(family: ModuleType) -> tuple[str, ...]:
    """How the names of tensors begin that the family has no use for."""
    found: tuple[str, ...] = getattr(family, "UNUSED", ())
    return found


def fit(family: ModuleType, checkpoint: Checkpoint) -> tuple[ModelConfig, Tensors]:
    """Sizes of the model, and the tensors that it takes from the files.

    A head that is stored although the config says that it is the embedding is passed over if it is
    the same, and else used, as transformers does.
    """
    shape: ModelConfig = family.shape(checkpoint.json("config.json"))
    passed = unused(family)
    tensors = checkpoint.tensors(passed)
    if not shape.tied:
        return shape, tensors
    tied = checkpoint.slots(family, shape)
    untied = checkpoint.slots(family, replace(shape, tied=False))
    embedding = next(name for name, slot in tied.items() if slot.parameter == "embedding.weight")
    for head in untied.keys() - tied.keys():
        if head in tensors.headers and embedding in tensors.headers:
            if not same(tensors, head, embedding):
                log.warning("%s differs from %s, so they are not tied.", head, embedding)
                return replace(shape, tied=False), tensors
            passed = (*passed, head)
    return shape, checkpoint.tensors(passed)


def _read(
    model: Transformer, checkpoint: Checkpoint, family: ModuleType, tensors: Tensors
) -> Reading:
    """Fills the model from the checkpoint, and makes it ready."""
    coded = stored_quant(checkpoint) is not None
    start = time.perf_counter()
    slots = checkpoint.slots(family, model.shape)
    load_weights(places(model, slots, coded), tensors)
    quantized.finalize(model)
    size = sum(header.bytes for header in tensors.headers.values())
    return Reading(size, time.perf_counter() - start)
