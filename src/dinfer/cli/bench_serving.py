"""bench latency, throughput and fairness: requests as users send them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
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
class Target(o.Opening, o.Server):
    """What takes the requests: a model in this process, or a server."""

    def run(
        self, context: typer.Context, at_once: int, **limits: Any
    ) -> "tuple[Run, dict[str, Any]]":
        """The way to it, and what to print of it."""
        from dinfer.bench.traffic import in_process, over

        if self.server is None:
            llm = self.open(max_sequences=at_once, **limits)
            return partial(in_process, llm), {"model": self.model, **model_figures(llm.loaded)}
        name = self.asked(context, self)

        def send(ask: "Ask") -> Iterable[TextEvent]:
            return self.send(name, [{"role": "user", "content": str(ask.prompt)}], ask.params)

        return partial(over, send), {"server": self.server, "model": name}


@dataclass(frozen=True)
class Work(o.Sampling):
    """What is asked, and how it is to be answered."""

    task: Task = "math"
    num: Num = 64
    max_tokens: Tokens = 160

    def texts(self) -> list[str]:
        """What users say: the first test problems of the task."""
        from dinfer.train.corpus import first_of, prompt_of

        return [prompt_of(example) for example in first_of(self.task, "test", 0, self.num)]

    def wanted(self) -> SamplingParams:
        """How all are answered."""
        own = vars(self).keys() - {"task", "num"}
        return SamplingParams(**{name: getattr(self, name) for name in own})

    def asks(self) -> "list[Ask]":
        """All of them."""
        from dinfer.bench.traffic import Ask

        params = self.wanted()
        return [Ask(text, params) for text in self.texts()]


@o.grouped
def latency(
    target: Target,
    work: Work,
    report: Report,
    context: typer.Context,
    repeats: Repeats = 3,
) -> None:
    """Requests one at a time."""
    from dinfer.bench.traffic import Load

    asks, settings = work.asks(), report.begin()
    run, head = target.run(context, 1)
    report.show({**head, **_measured(run, asks, Load(), repeats), **settings})


@o.grouped
def throughput(
    target: Target,
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

    asks, settings = work.asks(), report.begin()
    run, head = target.run(context, concurrency)
    found = _measured(run, asks, Load(concurrency, rate, work.seed), repeats)
    report.show({**head, "concurrency": concurrency, "rate": rate, **found, **settings})


@o.grouped
def fairness(
    target: Target,
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

    asks, settings = mixed(work.texts(), work.wanted(), long_tokens), report.begin()
    run, head = target.run(context, concurrency, max_rows=max_rows)
    found = rounds(run, asks, concurrency, repeats).figures()
    report.show({**head, "concurrency": concurrency, **found, **settings})


def _measured(run: "Run", asks: "list[Ask]", load: "Load", repeats: int) -> dict[str, Any]:
    from dinfer.bench.traffic import Load, figures

    run(asks[: max(2, load.at_once)], Load(load.at_once))
    return figures([run(asks, load) for _ in range(repeats)])
