"""quantize."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dinfer.cli import options as o


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(epilog="Example: dinfer quantize tiny-llada /tmp/tiny-llada-int8")(quantize)


def quantize(
    source: Annotated[str, typer.Argument(help="Bundled name, folder, or Hugging Face id.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; it must be new or empty.")],
    scheme: Annotated[
        str, typer.Option("--scheme", help="int8, int4 or int4:group=N (32, 64, 128, 256).")
    ] = "int8",
    family: o.Family = None,
    as_json: o.Json = False,
) -> None:
    """Writes a checkpoint with its layers' weights in fewer bits; such a folder loads quickly."""
    from dinfer.loader.quantize import quantize

    console = Console(stderr=True)
    start, total = time.perf_counter(), 0
    for path, size in quantize(source, target, scheme, family):
        total += size
        if not as_json and console.is_terminal:
            console.print(f"{path.name}: {size / 2**20:.1f} MiB")
    seconds = time.perf_counter() - start
    if as_json:
        found = {"folder": str(target), "scheme": scheme, "bytes": total, "seconds": seconds}
        typer.echo(json.dumps(found))
        return
    typer.echo(
        f"{target}: {total / 2**20:.1f} MiB of weights in {scheme}, {seconds:.1f} s"
        f" ({total / seconds / 1e6:.0f} MB/s)."
    )
