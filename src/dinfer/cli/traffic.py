"""bench latency, throughput and fairness: requests as users send them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dinfer.cli import options as o
from dinfer.cli.bench import Num, Report, Task, Tokens, bench, model_figures
from dinfer.request import SamplingParams, TextEvent

if TYPE_CHECKING:
    from dinfer.bench.traffic import Ask, Load, Run

AtOnce = Annotated[int, typer.Option("--concurrency", min=1, help="Requests at once.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; medians over all are printed.")]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    bench.command(epilog="Example: dinfer bench latency --task math --num 20")(latency)
    bench.command(epilog="Example: dinfer bench throughput --num 64 --concurrency 32")(throughput)
    bench.command(epilog="Example: dinfer bench fairness --concurrency 32")(fairness)


@dataclass(frozen=True)
class Work:
    """What is asked."""

    task: Task = "math"
    num: Num = 64
    max_tokens: Tokens = 160

    def texts(self) -> list[str]:
        """What users say: the first test problems of the task."""
        from dinfer.train.corpus import draws, prompt_of

        return [prompt_of(example) for example in islice(draws(self.task, "test", 0), self.num)]

    def asks(self, params: SamplingParams) -> "list[Ask]":
        """All answered alike."""
        from dinfer.bench.traffic import Ask

        return [Ask(text, params) for text in self.texts()]


@o.grouped
def latency(
    opening: o.Opening,
    sampling: o.Sampling,
    server: o.Server,
    work: Work,
    report: Report,
    context: typer.Context,
    repeats: Repeats = 3,
) -> None:
    """Requests one at a time."""
    from dinfer.bench.traffic import Load

    params = sampling.params(max_tokens=work.max_tokens)
    settings = report.begin()
    run, head = _run(opening, server, context, 1)
    report.show({**head, **_measured(run, work.asks(params), Load(), repeats), **settings})


@o.grouped
def throughput(
    opening: o.Opening,
    sampling: o.Sampling,
    server: o.Server,
    work: Work,
    report: Report,
    context: typer.Context,
    concurrency: AtOnce = 32,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Poisson arrivals a second instead.")
    ] = None,
    repeats: Repeats = 3,
) -> None:
    """Many requests at once, or arriving at random."""
    from dinfer.bench.traffic import Load

    params = sampling.params(max_tokens=work.max_tokens)
    settings = report.begin()
    run, head = _run(opening, server, context, concurrency)
    load = Load(concurrency, rate, sampling.seed)
    found = _measured(run, work.asks(params), load, repeats)
    report.show({**head, "concurrency": concurrency, "rate": rate, **found, **settings})


@o.grouped
def fairness(
    opening: o.Opening,
    sampling: o.Sampling,
    server: o.Server,
    work: Work,
    report: Report,
    context: typer.Context,
    concurrency: AtOnce = 32,
    long_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of every eighth answer, which fills them all.")
    ] = 384,
    max_rows: o.MaxRows = None,
    repeats: Repeats = 2,
) -> None:
    """A request among others beside the same one alone: the wait for its first text, and how much
    longer short and long ones take.
    """
    from dinfer.bench.fairness import mixed, rounds

    params = sampling.params(max_tokens=work.max_tokens)
    settings = report.begin()
    run, head = _run(opening, server, context, concurrency, max_rows=max_rows)
    asks = mixed(work.texts(), params, long_tokens)
    found = rounds(run, asks, concurrency, repeats).figures()
    report.show({**head, "concurrency": concurrency, **found, **settings})


def _run(
    opening: o.Opening, server: o.Server, context: typer.Context, at_once: int, **limits: Any
) -> "tuple[Run, dict[str, Any]]":
    """What takes the requests, and what to print of it."""
    from dinfer.bench.traffic import in_process, over

    if server.server is None:
        llm = opening.open(max_sequences=at_once, **limits)
        return partial(in_process, llm), {"model": opening.model, **model_figures(llm.loaded)}
    model = server.model(context, opening)

    def send(ask: "Ask") -> Iterable[TextEvent]:
        return server.send(model, [{"role": "user", "content": str(ask.prompt)}], ask.params)

    return partial(over, send), {"server": server.server, "model": model}


def _measured(run: "Run", asks: "list[Ask]", load: "Load", repeats: int) -> dict[str, Any]:
    from dinfer.bench.traffic import Load, figures

    run(asks[: max(2, load.at_once)], Load(load.at_once))
    return figures([run(asks, load) for _ in range(repeats)])
