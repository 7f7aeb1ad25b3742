"""list and info."""

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dinfer import registry
from dinfer.cli import options as o


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command("list", epilog="Example: dinfer list --json")(list_all)
    app.command(epilog="Example: dinfer info tiny-sdar")(info)


def list_all(as_json: o.Json = False) -> None:
    """What there is: bundled models, families, decoders, caches, iterations."""
    from dinfer.loader.load import bundled

    found = {"model": bundled(), "family": registry.names("model")}
    found |= {kind: registry.names(kind) for kind in registry.KINDS}
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(box=None, show_header=False)
    for kind, known in found.items():
        table.add_row(kind, ", ".join(known))
    Console().print(table)


def info(
    model: Annotated[
        str, typer.Argument(help="Bundled name, folder, GGUF file, or Hugging Face id.")
    ],
    as_json: o.Json = False,
    fact: o.Fact = None,
    family: o.Family = None,
) -> None:
    """Family, sizes, facts, recommended strategies and the memory that a request needs."""
    found = describe(model, o.read_facts(fact), family)
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(box=None, show_header=False)
    for name, value in found.items():
        table.add_row(name, str(value))
    Console().print(table)


def describe(name: str, facts: dict[str, Any], asked: str | None = None) -> dict[str, Any]:
    """Facts and sizes of a checkpoint from its config files alone; no weights are read.

    asked: a family, whatever the config says; its tensors' names and shapes are then checked.
    """
    import torch

    from dinfer.kv.pool import page_bytes
    from dinfer.loader.load import DTYPES, blank, choose_family, open_checkpoint
    from dinfer.loader.model_info import facts_of
    from dinfer.step import PAGE

    checkpoint = open_checkpoint(name)
    config = checkpoint.json("config.json")
    family = choose_family(checkpoint, asked)
    shape = family.shape(config)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.template()
    ends = template.end_ids(tokenizer) if tokenizer and template else frozenset()
    known = facts_of(family, checkpoint, facts, ends)
    kinds: dict[str, tuple[torch.dtype, str | None]] = {
        name: (dtype, None) for name, dtype in DTYPES.items()
    }
    kinds |= {scheme: (torch.bfloat16, scheme) for scheme in registry.names("quant")}
    models = {kind: blank(family, shape, *how) for kind, how in kinds.items()}
    memory = {kind: round(_bytes(model) / 2**20, 1) for kind, model in models.items()}
    parameters = sum(p.numel() for p in models["float32"].parameters())
    pages = -(-known.context // PAGE)
    request = {
        kind: round(pages * page_bytes(shape, dtype) / 2**20, 2) for kind, dtype in DTYPES.items()
    }
    return {
        "model": name,
        "family": family.__name__.rpartition(".")[2],
        "parameters": parameters,
        "active_parameters": parameters - shape.idle_parameters,
        **dataclasses.asdict(shape),
        "mask_id": known.mask_id,
        "eos_ids": sorted(known.eos_ids),
        "block_length": known.block_length,
        "attention": _attention(known),
        "iteration": known.iteration,
        "cache": known.cache,
        "decoder": known.decoder,
        "weights_mib": memory,
        "request_mib_at_full_context": request,
    }


def _attention(known: Any) -> str:
    if known.causal:
        return "causal text, open blocks in full"
    return "full" if known.block_length is None else "block-causal"


def _bytes(model: Any) -> int:
    """Memory of a model's weights."""
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
