"""eval and train."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dinfer.cli import options as o
from dinfer.errors import UnknownName
from dinfer.registry import near

LOG_EVERY = 10
"""Steps between two lines of `train` where standard error is no terminal."""


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command("eval", epilog="Example: dinfer eval --task math --split test --num 500")(evaluate)
    app.command(epilog="Example: dinfer train tiny-sdar --out runs/tiny-sdar")(train)


@dataclass(frozen=True)
class Problems:
    """Which problems are asked. Raises UnknownName for a task or split that there is not. The split
    *own* is asked whole unless it has more than `num`.
    """

    task: Annotated[str, typer.Option(help="math, brief, words or tables.")] = "math"
    split: Annotated[str, typer.Option(help="train, dev, test; own (words, tables).")] = "test"
    num: Annotated[int, typer.Option(min=1, help="Problems.")] = 500
    max_tokens: o.MaxTokens = 160

    def __post_init__(self) -> None:
        from dinfer.train.corpus import OWN, SPLITS, TASKS, own_size

        own = own_size(self.task)
        splits = (*SPLITS, OWN) if own else SPLITS
        for kind, known in (("task", TASKS), ("split", splits)):
            given = getattr(self, kind)
            if given not in known:
                raise UnknownName(f"Unknown {kind} {given!r}.{near(given, list(known))}")
        if self.split == OWN:
            object.__setattr__(self, "num", min(self.num, own))


@o.grouped
def evaluate(
    opening: o.Opening,
    sampling: o.Sampling,
    problems: Problems,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 32,
    single: Annotated[
        int, typer.Option(min=0, help="Also time this many problems one at a time.")
    ] = 20,
    as_json: o.Json = False,
) -> None:
    """Accuracy and cost on held-out problems of a bundled task."""
    from dinfer.eval.tasks import evaluate as run

    task, split, num = problems.task, problems.split, problems.num
    params = sampling.params(max_tokens=problems.max_tokens)
    llm = opening.open(max_sequences=concurrency)
    with _progress(wanted=not as_json) as progress:
        bar = progress.add_task(f"{task} {split}", total=num)

        def done(count: int) -> None:
            progress.update(bar, completed=count)

        score = run(llm, task, split, num, params, sampling.seed, single, done)
    found: dict[str, Any] = {
        "model": opening.model,
        "concurrency": concurrency,
        **dataclasses.asdict(score),
    }
    for kind in ("iteration", "cache", "decoder"):
        found[kind] = getattr(params, kind) or getattr(llm.facts, kind)
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(box=None, show_header=False)
    for name, value in found.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    Console().print(table)


def train(
    name: Annotated[str, typer.Argument(help="tiny-sdar, tiny-llada or tiny-words.")],
    out: Annotated[
        Path, typer.Option(help="Folder for the run; the model is written to OUT/model.")
    ],
    seed: Annotated[int, typer.Option(help="Of data, noise and first weights.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Other than the recipe's.")] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="A trained model's folder to take the first weights from."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="torch.compile the small pieces (needs a C++ compiler)."),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(help="float32, or bfloat16 products where the processor has units for them."),
    ] = "float32",
    device: o.Device = "auto",
    data: Annotated[
        Path | None,
        typer.Option(help='Own examples to train on too: JSONL of {"prompt": ..., "answer": ...}.'),
    ] = None,
) -> None:
    """Trains a bundled model from its seed; started again on the same folder, it goes on where it
    stopped. Saves every two minutes and on Ctrl-C.
    """
    from dinfer.train.run import TrainOptions, train_bundled

    with _progress() as progress:
        bar = progress.add_task(name, total=None)

        def report(step: int, total: int, loss: float, seconds: float) -> None:
            note = f"{name}  loss {loss:.3f}  {seconds:.1f} s a step"
            progress.update(bar, completed=step, total=total, description=note)
            if progress.disable and (step % LOG_EVERY == 0 or step == total):
                typer.echo(f"{step}/{total}  {note}", err=True)

        options = TrainOptions(out, seed, steps, start, threads, compiled, dtype, device, data)
        folder = train_bundled(name, options, report)
    typer.echo(str(folder))


def _progress(wanted: bool = True) -> Progress:
    """A bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not (wanted and console.is_terminal))
