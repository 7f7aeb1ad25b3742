"""bench: step, growth, versus, and what all its commands share."""

import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dinfer.cli import options as o
from dinfer.errors import RequestError

if TYPE_CHECKING:
    from dinfer.bench.versus import Canvas, Rival
    from dinfer.engine.llm import LLM
    from dinfer.loader.load import Loaded

Repeats = Annotated[int, typer.Option(min=1, help="Repetitions; medians are printed.")]
Plot = Annotated[Path | None, typer.Option(help="Image file for a plot.")]
Num = Annotated[int, typer.Option(min=1, help="Requests.")]
Task = Annotated[str, typer.Option(help="Prompts: math or brief.")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Canvas of the answer.")]
SHAPE = "Bundled name, folder, id, or a shape with random weights such as 0.7b."

bench = typer.Typer(help="Measures speed: the one place for claims about it.", no_args_is_help=True)


@dataclass(frozen=True)
class Report:
    """How a benchmark runs and prints."""

    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None
    as_json: o.Json = False

    def begin(self) -> dict[str, Any]:
        """Sets the threads; what every result is printed with."""
        import torch

        from dinfer.bench.machine import settings

        torch.set_num_threads(self.threads or torch.get_num_threads())
        return settings()

    def show(self, found: dict[str, Any]) -> None:
        """Prints the figures."""
        if self.as_json:
            typer.echo(json.dumps(found))
            return
        table = Table(box=None, show_header=False)
        for name, value in found.items():
            table.add_row(name, _said(value))
        Console().print(table)


@dataclass(frozen=True)
class Weights:
    """A model, or only the shape of one."""

    model: Annotated[str, typer.Option("--model", "--shape", "-m", help=SHAPE)] = o.DEFAULT_MODEL
    dtype: o.Dtype = "auto"
    device: o.Device = "auto"
    fact: o.Fact = None
    quant: o.Quant = None
    compiled: o.Compiled = None
    family: o.Family = None

    def open(self) -> "Loaded":
        """The model, with random weights where the name is that of a shape."""
        from dinfer.bench.shape import open_any

        facts = o.read_facts(self.fact)
        how = (self.dtype, self.device, self.quant, facts, self.family, self.compiled)
        return open_any(self.model, *how)


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    bench.command(epilog="Example: dinfer bench step --model 0.7b --rows 32")(step)
    bench.command(epilog="Example: dinfer bench growth --lengths 64,256,1024")(growth)
    bench.command(epilog="Example: dinfer bench versus --fast-dllm ../Fast-dLLM")(versus)
    app.add_typer(bench, name="bench")


@o.grouped
def step(
    weights: Weights,
    report: Report,
    rows: Annotated[int, typer.Option(min=1, help="Masked rows of each sequence.")] = 32,
    context: Annotated[int, typer.Option(min=0, help="Stored positions they see.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in the step.")] = 1,
    repeats: Repeats = 20,
) -> None:
    """One denoising step beside its floor: bytes and operations, at this machine's rates."""
    from dinfer.bench.step import measure_step

    settings = report.begin()
    loaded = weights.open()
    measured = measure_step(loaded, rows, context, sequences, repeats, weights.compiled).as_dict()
    report.show({"model": weights.model, **model_figures(loaded), **measured, **settings})


@o.grouped
def growth(
    weights: Weights,
    report: Report,
    lengths: Annotated[str, typer.Option(help="New tokens, with commas.")] = "64,128,256,384",
    decoder: o.Decoder = "fixed:steps=8",
    cache: o.Cache = None,
    repeats: Repeats = 3,
    plot: Plot = None,
) -> None:
    """Seconds per token against the length of the answer, every token generated."""
    from dinfer.bench.machine import Timing, interleaved
    from dinfer.bench.plot import lines
    from dinfer.bench.traffic import Ask, Load, in_process
    from dinfer.engine.llm import LLM
    from dinfer.request import SamplingParams

    settings = report.begin()
    wanted = _numbers("--lengths", lengths)
    # Room for more than one text, so that pages lie in runs whatever ran before.
    llm = LLM(weights.open(), max_sequences=4, compiled=weights.compiled)
    prompt = [5 + p % 50 for p in range(32)]

    def cost(length: int) -> float:
        params = SamplingParams(length, ignore_eos=True, decoder=decoder, cache=cache)
        return 1000 * in_process(llm, [Ask(prompt, params)], Load()).seconds / length

    for length in wanted:
        cost(length)
    values = interleaved({str(n): partial(cost, n) for n in wanted}, repeats)
    figures = {name: asdict(Timing.of(each)) for name, each in values.items()}
    if plot is not None:
        medians = [figures[str(n)]["median"] for n in wanted]
        lines(plot, {weights.model: (wanted, medians)}, "Cost of a token", "new tokens", "ms")
    report.show({"model": weights.model, "milliseconds_per_token": figures, **settings})


@dataclass(frozen=True)
class Rivalry:
    """The other side of `versus`."""

    fast_dllm: Annotated[
        Path | None, typer.Option(help="Fast-dLLM checkout; none: our baseline from its paper.")
    ] = None
    python: Annotated[
        str, typer.Option(help="Interpreter with transformers 4.x and einops for the checkout.")
    ] = sys.executable


@dataclass(frozen=True)
class Ours:
    """Our side of `versus`. The weights are the same on both; theirs are never quantized."""

    model: Annotated[str, typer.Option("--model", "--shape", "-m", help=SHAPE)] = "tiny-llada"
    dtype: o.Dtype = "auto"
    quant: o.Quant = None
    compiled: o.Compiled = None
    family: o.Family = None
    concurrency: Annotated[int, typer.Option(min=1, help="Of ours, for throughput.")] = 32

    def open(self) -> "tuple[LLM, Loaded]":
        """Ours, and the plain weights for the other side."""
        from dinfer.bench.shape import open_any
        from dinfer.engine.llm import LLM
        from dinfer.runner.native_cpu import is_prepacked

        given = (self.model, self.dtype, "cpu")
        plain = loaded = open_any(*given, self.quant, family=self.family, compiled=self.compiled)
        if self.quant or self.compiled or is_prepacked(loaded.model):
            plain = open_any(*given, family=self.family, compiled=False)
        return LLM(loaded, max_sequences=self.concurrency, compiled=self.compiled), plain


@o.grouped
def versus(
    strategies: o.Strategies,
    ours: Ours,
    rivalry: Rivalry,
    report: Report,
    task: Task = "math",
    num: Num = 100,
    max_tokens: Tokens = 160,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Hold both sides to this (random weights: 4).")
    ] = None,
    repeats: Repeats = 2,
) -> None:
    """dInfer beside Fast-dLLM on the same weights, prompts and canvas: quality, forwards, speed."""
    from dinfer.bench.shape import SHAPES
    from dinfer.bench.versus import Canvas, duel

    settings = report.begin()
    llm, plain = ours.open()
    random = ours.model in SHAPES
    tokens_per_step = tokens_per_step or (4 if random else None)
    if max_tokens % 32 or (tokens_per_step and 32 % tokens_per_step):
        raise RequestError(
            f"max_tokens is {max_tokens} and tokens per step {tokens_per_step};"
            " Fast-dLLM takes whole blocks of 32 and a divisor of 32."
        )
    canvas = Canvas(max_tokens, tokens_per_step=tokens_per_step)
    params = strategies.params(max_tokens=max_tokens, ignore_eos=random)
    if tokens_per_step and params.decoder is None:
        params = replace(params, decoder=f"fixed:steps={32 // tokens_per_step}")
    prompts = (
        [[5 + (p * 31 + n) % 800 for p in range(128)] for n in range(num)]
        if random
        else prompts_of(llm, task, num)
    )
    console = Console(stderr=True, quiet=report.as_json)
    with ExitStack() as stack:
        rival = _rival(stack, rivalry, plain, canvas)
        result = duel(llm, rival, prompts, params, repeats, lambda x: console.print(x, style="dim"))
    quality = {} if random else _quality(llm, task, num, result)
    head = {"model": ours.model, **model_figures(llm.loaded), "quant": ours.quant}
    theirs = {"rival": rival.name, "mode": str(result.mode)}
    report.show(
        {**head, **theirs, **quality, **result.figures(), "modes_tried": result.tried, **settings}
    )


def _rival(stack: ExitStack, rivalry: Rivalry, loaded: "Loaded", canvas: "Canvas") -> "Rival":
    from dinfer.bench.shape import SHAPES, write_checkpoint
    from dinfer.bench.versus import Baseline, Original

    if rivalry.fast_dllm is None:
        return Baseline(loaded, canvas)
    folder = loaded.folder
    if loaded.name in SHAPES:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dtype = str(loaded.model.embedding.weight.dtype).removeprefix("torch.")
        write_checkpoint(loaded.name, dtype, folder)
    return stack.enter_context(Original(rivalry.fast_dllm, rivalry.python, folder, loaded, canvas))


def _quality(llm: "LLM", task: str, num: int, result: Any) -> dict[str, float | None]:
    from dinfer.eval.tasks import draw, grade

    examples, _ = draw(llm, task, "test", num)
    tokenizer = llm.prompts.tokenizer
    texts = {
        "": [output.text for output in result.ours[0].outputs],
        "rival_": [
            tokenizer.decode([t for t in ids if t not in llm.facts.eos_ids])
            for ids in result.theirs[0].ids
        ],
    }
    return {
        side + name: value
        for side, answers in texts.items()
        for name, value in vars(grade(examples, answers)).items()
    }


def prompts_of(llm: "LLM", task: str, num: int) -> list[list[int]]:
    """The first test problems of a task as token ids."""
    from dinfer.eval.tasks import draw

    return draw(llm, task, "test", num)[1]


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"{option} is {text!r}; give whole numbers with commas.") from error
    if min(found) < 1:
        raise RequestError(f"{option} is {text!r}; each must be 1 or more.")
    return found


def model_figures(loaded: "Loaded") -> dict[str, Any]:
    """What to print of a model."""
    from importlib import import_module

    import torch

    from dinfer.loader.load import blank

    weight = loaded.model.embedding.weight
    family = import_module(f"dinfer.model.{loaded.family}")
    plain = blank(family, loaded.model.shape, torch.float32)  # codes are no parameters
    read = {"load": str(loaded.read)} if loaded.read else {}
    return {
        "parameters": sum(p.numel() for p in plain.parameters()),
        **read,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
    }


def _said(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        said = "{median:.4g} ({least:.4g} to {most:.4g}, 95 % within {p95:.4g}, {repeats} times)"
        return said.format(**value)
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_said(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
