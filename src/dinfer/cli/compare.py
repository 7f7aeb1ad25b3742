"""compare and tune: which strategies to use."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dinfer.cli import options as o
from dinfer.errors import RequestError

if TYPE_CHECKING:
    from dinfer.eval.compare import Row
    from dinfer.request import SamplingParams

Task = Annotated[
    str, typer.Option(help="math, brief, or a file of JSON lines with prompt, answer.")
]
Num = Annotated[int, typer.Option(min=2, help="Prompts.")]
Specs = list[str] | None


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    example = "Example: dinfer compare --task math --decoder fixed --decoder threshold --cache dual"
    app.command(epilog=example)(compare)
    app.command(epilog="Example: dinfer tune --task questions.jsonl --max-loss 1")(tune)


@o.grouped
def compare(
    opening: o.Opening,
    task: Task = "math",
    split: Annotated[str, typer.Option(help="train, dev or test.")] = "test",
    num: Num = 100,
    decoder: Annotated[Specs, typer.Option(help="Specs; all combinations run.")] = None,
    cache: Annotated[Specs, typer.Option(help="Specs.")] = None,
    iteration: Annotated[Specs, typer.Option(help="Specs.")] = None,
    max_tokens: o.MaxTokens = 160,
    plot: Annotated[Path | None, typer.Option(help="Image file: quality against speed.")] = None,
    as_json: o.Json = False,
) -> None:
    """Quality and cost of every combination of strategies on the same prompts."""
    from dinfer.eval.compare import Meter, every, front, items_of

    llm = opening.open()
    choices = every(decoder or [], cache or [], iteration or [])
    meter = Meter(llm, items_of(llm, task, split, num), _params(max_tokens))
    meter.check(choices)
    console = Console(stderr=True, quiet=as_json)
    rows = []
    with console.status("") as status:
        for number, choice in enumerate(choices, 1):
            status.update(f"{number} of {len(choices)}: {choice.specs() or 'recommended'}")
            rows.append(meter.measure(choice))
    best = front(rows)
    if plot is not None:
        _plot(plot, rows, best, task)
    if as_json:
        typer.echo(json.dumps([asdict(row) | {"front": row in best} for row in rows]))
        return
    _table(rows, best)


@o.grouped
def tune(
    opening: o.Opening,
    task: Task = "math",
    num: Num = 100,
    max_loss: Annotated[float, typer.Option(min=0, help="Points of accuracy to give up.")] = 1.0,
    max_tokens: o.MaxTokens = 160,
    write: Annotated[
        bool, typer.Option("--write", help="Make them the model's recommended ones (dinfer.json).")
    ] = False,
    as_json: o.Json = False,
) -> None:
    """Finds the quickest strategies that lose little: on one half of the prompts, confirmed on the
    other.
    """
    from dinfer.eval import compare as c

    llm = opening.open()
    items = c.items_of(llm, task, "dev", num)
    if len(items) < 2:
        raise RequestError(f"{len(items)} prompt was given; tune needs two or more.")
    params, half = _params(max_tokens), len(items) // 2
    console = Console(stderr=True, quiet=as_json)
    with console.status("") as status:
        choice, found, plain = c.tune(
            c.Meter(llm, items[:half], params),
            c.Meter(llm, items[half:], params),
            max_loss,
            lambda row: status.update(f"{row.choice.specs()}: {_percent(row.accuracy)}"),
        )
    if write:
        _write(llm.loaded.folder, choice.specs())
    if as_json:
        typer.echo(json.dumps({**choice.specs(), "found": asdict(found), "plain": asdict(plain)}))
        return
    _table([plain, found], [])
    typer.echo(" ".join(f"--{name} {spec}" for name, spec in choice.specs().items()))


def _params(max_tokens: int) -> "SamplingParams":
    from dinfer.request import SamplingParams

    return SamplingParams(max_tokens)


def _write(folder: Path, specs: dict[str, str]) -> None:
    file = folder / "dinfer.json"
    known: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    try:
        file.write_text(json.dumps(known | specs, indent=2, sort_keys=True) + "\n", "utf-8")
    except OSError as error:
        raise RequestError(f"{str(file)!r} cannot be written: {error.strerror}.") from error


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(rows: "list[Row]", best: "list[Row]") -> None:
    table = Table(box=None)
    heads = [
        "",
        "strategies",
        "right %",
        "BLEU",
        "BLEU to plain",
        "forwards",
        "tokens each",
        "rows",
    ]
    for head in (*heads, "seconds"):
        table.add_column(head, justify="left" if head in ("", "strategies") else "right")
    for row in rows:
        table.add_row(
            "*" if row in best else "",
            " ".join(row.choice.specs().values()) or "recommended",
            *map(_percent, (row.accuracy, row.bleu, row.bleu_plain)),
            f"{row.forward_passes:.1f}",
            f"{row.tokens_per_forward:.2f}",
            f"{row.rows_run:.0f}",
            f"{row.seconds:.2f}",
        )
    Console().print(table)
    if best:
        typer.echo("* no other one is both better and quicker")


def _plot(file: Path, rows: "list[Row]", best: "list[Row]", task: str) -> None:
    from dinfer.bench.plot import points

    points(
        file,
        [
            (row.seconds, row.accuracy or 0.0, " ".join(row.choice.specs().values()), row in best)
            for row in rows
        ],
        f"{task}: quality against time",
        "seconds for all prompts",
        "right, %",
    )
