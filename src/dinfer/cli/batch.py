"""batch."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from dinfer.cli import options as o
from dinfer.cli.serve import named
from dinfer.errors import RequestError


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(epilog="Example: dinfer batch requests.jsonl results.jsonl -m tiny-sdar")(batch)


@o.grouped
def batch(
    given: Annotated[
        Path, typer.Argument(metavar="IN", help="Requests in OpenAI's batch form; .parquet too.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Results, a line each; what is there stays.")
    ],
    loading: o.Loading,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Name, folder or hub id; or NAME=FOLDER.")
    ] = o.DEFAULT_MODEL,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Results in the order of the requests.")
    ] = False,
    max_sequences: Annotated[int, typer.Option(min=1, help="Requests in one step.")] = 64,
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Lines in memory at a time; none: twice --max-sequences."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Engines in processes of their own, on Ray; none: one, in here."),
    ] = None,
    ray_address: o.RayAddress = None,
    as_json: o.Json = False,
) -> None:
    """Answers a file of requests as a server would. Stopped at any moment, the same command goes on
    where it was.
    """
    try:
        from dinfer.batch.application import engine
    except ModuleNotFoundError as error:
        text = f"dinfer batch needs {error.name}; install the extra: pip install 'dinfer[server]'."
        raise RequestError(text) from error
    from dinfer.batch.progress import Progress, Tally
    from dinfer.batch.run import Batch
    from dinfer.cluster.workers import engines

    ((name, source),) = named([model]).items()
    options = {"max_sequences": max_sequences, **vars(loading)}
    with Batch.open(given, out, in_order) as work:
        tally = Tally(len(work.is_done), int(work.is_done.sum()))

        async def answer() -> None:
            opened = (
                engine(name, source, options)
                if workers is None
                else engines(workers, ray_address, name, source, options)
            )
            async with opened as call:
                tally.began = time.monotonic()
                at_once = window or 2 * max_sequences * (workers or 1)
                with Progress(tally, say) as progress:
                    await work.run(call, at_once, progress.add)

        if tally.done < tally.lines:
            asyncio.run(answer())
    if as_json:
        typer.echo(json.dumps(tally.figures()))
    else:
        say(tally.sentence())


def say(text: str) -> None:
    """A line on standard error."""
    typer.echo(text, err=True)
