"""compare and tune: which strategies to use."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from dinfer.cli import options as o
from dinfer.errors import RequestError
from dinfer.request import SamplingParams

if TYPE_CHECKING:
    from dinfer.engine.llm import LLM
    from dinfer.eval.compare import Choice, Item, Row

Specs = list[str] | None


@dataclass(frozen=True)
class Questions:
    """What is asked of every choice."""

    task: Annotated[
        str, typer.Option(help="math, brief, or a file of JSON lines with prompt, answer.")
    ] = "math"
    num: Annotated[int, typer.Option(min=2, help="Prompts.")] = 100
    max_tokens: o.MaxTokens = 160

    def items(self, llm: "LLM", split: str) -> "list[Item]":
        """The prompts."""
        from dinfer.eval.compare import items_of

        return items_of(llm, self.task, split, self.num)

    @property
    def params(self) -> SamplingParams:
        """The base of all choices."""
        return SamplingParams(self.max_tokens)


@dataclass(frozen=True)
class Choices:
    """What is compared."""

    decoder: Annotated[Specs, typer.Option(help="Specs; all combinations run.")] = None
    cache: Annotated[Specs, typer.Option(help="Specs.")] = None
    iteration: Annotated[Specs, typer.Option(help="Specs.")] = None
    each: Annotated[
        bool, typer.Option("--each", help="Not all combinations: each beside the recommended.")
    ] = False

    def list(self) -> "list[Choice]":
        """Every combination, or the recommended one and each spec by itself."""
        from dinfer.eval.compare import Choice, every

        kinds = {"decoder": self.decoder, "cache": self.cache, "iteration": self.iteration}
        if not self.each:
            return every(*(specs or [] for specs in kinds.values()))
        return [
            Choice(),
            *(Choice(**{kind: spec}) for kind, specs in kinds.items() for spec in specs or []),
        ]


@dataclass(frozen=True)
class Report:
    """How results are shown."""

    plot: Annotated[Path | None, typer.Option(help="Image file: quality against speed.")] = None
    markdown: Annotated[bool, typer.Option("--markdown", help="The table in Markdown.")] = False
    as_json: o.Json = False


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    example = "Example: dinfer compare --task math --decoder fixed --decoder threshold --cache dual"
    app.command(epilog=example)(compare)
    app.command(epilog="Example: dinfer tune --task questions.jsonl --max-loss 1")(tune)


@o.grouped
def compare(
    opening: o.Opening,
    questions: Questions,
    choices: Choices,
    report: Report,
    split: Annotated[str, typer.Option(help="train, dev or test.")] = "test",
    semantic: Annotated[
        str | None,
        typer.Option(help="Adds nearness in meaning: a sentence-transformers folder, or default."),
    ] = None,
) -> None:
    """Quality and cost of every combination of strategies on the same prompts."""
    from dinfer.eval.compare import Meter, front
    from dinfer.eval.semantic import embedder

    embed = None if semantic is None else embedder(semantic)
    llm = opening.open()
    wanted = choices.list()
    meter = Meter(llm, questions.items(llm, split), questions.params, embed)
    meter.check(wanted)
    rows = []
    with Console(stderr=True, quiet=report.as_json).status("") as status:
        for number, choice in enumerate(wanted, 1):
            status.update(f"{number} of {len(wanted)}: {_name(choice)}")
            rows.append(meter.measure(choice))
    best = front(rows)
    if report.plot is not None:
        _plot(report.plot, rows, best, f"{opening.model}, {questions.task}")
    if report.as_json:
        typer.echo(json.dumps([asdict(row) | {"front": row in best} for row in rows]))
        return
    _table(rows, best, report.markdown)


@o.grouped
def tune(
    opening: o.Opening,
    questions: Questions,
    max_loss: Annotated[float, typer.Option(min=0, help="Points of accuracy to give up.")] = 1.0,
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
    items = questions.items(llm, "dev")
    if len(items) < 2:
        raise RequestError(f"{len(items)} prompt was given; tune needs two or more.")
    params, half = questions.params, len(items) // 2
    with Console(stderr=True, quiet=as_json).status("") as status:
        choice, found, plain = c.tune(
            c.Meter(llm, items[:half], params),
            c.Meter(llm, items[half:], params),
            max_loss,
            lambda row: status.update(f"{_name(row.choice)}: {_percent(row.accuracy)}"),
        )
    if write:
        _write(llm.loaded.folder, choice.specs())
    if as_json:
        typer.echo(json.dumps({**choice.specs(), "found": asdict(found), "plain": asdict(plain)}))
        return
    _table([plain, found], [])
    chosen = " ".join(f"--{name} {spec}" for name, spec in choice.specs().items())
    typer.echo(chosen or "The recommended strategies.")


def _write(folder: Path, specs: dict[str, str]) -> None:
    file = folder / "dinfer.json"
    known: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    try:
        file.write_text(json.dumps(known | specs, indent=2, sort_keys=True) + "\n", "utf-8")
    except OSError as error:
        raise RequestError(f"{str(file)!r} cannot be written: {error.strerror}.") from error


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _name(choice: "Choice") -> str:
    return " ".join(choice.specs().values()) or "recommended"


def _table(rows: "list[Row]", best: "list[Row]", markdown: bool = False) -> None:
    """Numbers are those of the plot."""
    semantic = any(row.semantic is not None for row in rows)
    heads = ["right %", "BLEU", "BLEU to plain", "forwards", "tokens each", "rows", "seconds"]
    table = Table(box=MARKDOWN if markdown else None)
    for head in ("", "", "strategies"):
        table.add_column(
            head, no_wrap=markdown, justify="left" if head else "right", overflow="fold"
        )
    for head in heads + ["meaning"] * semantic:
        table.add_column(head, justify="right", no_wrap=markdown)
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number),
            "*" if row in best else "",
            f"`{_name(row.choice)}`" if markdown else _name(row.choice),
            *map(_percent, (row.accuracy, row.bleu, row.bleu_plain)),
            f"{row.forward_passes:.1f}",
            f"{row.tokens_per_forward:.2f}",
            f"{row.rows_run:.0f}",
            f"{row.seconds:.2f}",
            *([f"{row.semantic:.3f}" if row.semantic is not None else "-"] if semantic else []),
        )
    Console(width=200 if markdown else None).print(table)
    if best:
        typer.echo("* no other one is both better and quicker")


def _plot(file: Path, rows: "list[Row]", best: "list[Row]", title: str) -> None:
    from dinfer.bench.plot import points

    points(
        file,
        [(row.seconds, row.accuracy or 0.0, _name(row.choice), row in best) for row in rows],
        f"{title}: quality against time",
        "seconds for all prompts",
        "right, %",
    )
