"""bench: step, latency, throughput, growth, versus."""

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
    from dinfer.engine.load import Loaded

Repeats = Annotated[int, typer.Option(min=1, help="Repetitions; medians are printed.")]
Plot = Annotated[Path | None, typer.Option(help="Image file for a plot.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Num = Annotated[int, typer.Option(min=1, help="Requests.")]
Task = Annotated[str, typer.Option(help="Prompts: math or brief.")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Canvas of the answer.")]
SHAPE = "Bundled name, folder, id, or a shape with random weights such as 0.7b."

bench = typer.Typer(help="Measures speed: the one place for claims about it.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    bench.command(epilog="Example: dinfer bench step --model 0.7b --rows 32")(step)
    bench.command(epilog="Example: dinfer bench latency --task math --num 20")(latency)
    bench.command(epilog="Example: dinfer bench throughput --num 64 --concurrency 32")(throughput)
    bench.command(epilog="Example: dinfer bench growth --lengths 64,256,1024")(growth)
    bench.command(epilog="Example: dinfer bench versus --fast-dllm ../Fast-dLLM")(versus)
    app.add_typer(bench, name="bench")


def step(
    model: Annotated[str, typer.Option("--model", "--shape", "-m", help=SHAPE)] = o.DEFAULT_MODEL,
    rows: Annotated[int, typer.Option(min=1, help="Masked rows of each sequence.")] = 32,
    context: Annotated[int, typer.Option(min=0, help="Stored positions they see.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in the step.")] = 1,
    repeats: Repeats = 20,
    threads: Threads = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    quant: o.Quant = None,
    as_json: o.Json = False,
) -> None:
    """One denoising step beside its floor: bytes and operations, at this machine's rates."""
    from dinfer.bench.shape import open_any
    from dinfer.bench.step import measure_step

    found = _settings(threads)
    loaded = open_any(model, dtype, device, quant)
    measured = measure_step(loaded, rows, context, sequences, repeats)
    _show({"model": model, **_model(loaded), **measured.as_dict(), **found}, as_json)


@o.grouped
def latency(
    opening: o.Opening,
    sampling: o.Sampling,
    task: Task = "math",
    num: Num = 20,
    max_tokens: Tokens = 160,
    repeats: Repeats = 3,
    threads: Threads = None,
    as_json: o.Json = False,
) -> None:
    """Requests one at a time."""
    from dinfer.bench.machine import Timing
    from dinfer.bench.traffic import one_at_a_time

    found = _settings(threads)
    llm = opening.open()
    prompts = prompts_of(llm, task, num)
    params = sampling.params(max_tokens=max_tokens)
    one_at_a_time(llm, prompts[:2], params)
    runs = [one_at_a_time(llm, prompts, params) for _ in range(repeats)]
    figures = {
        "seconds_per_request": asdict(Timing.of([x for run in runs for x in run.latency])),
        "seconds_to_first_text": asdict(Timing.of([x for run in runs for x in run.first])),
        "tokens_per_second": asdict(Timing.of([run.tokens_per_second for run in runs])),
        "tokens_per_forward": runs[0].tokens / runs[0].forward_passes,
    }
    _show({"model": opening.model, **_model(llm.loaded), **figures, **found}, as_json)


@o.grouped
def throughput(
    opening: o.Opening,
    sampling: o.Sampling,
    task: Task = "math",
    num: Num = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at once.")] = 32,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Poisson arrivals a second; none: all at once.")
    ] = None,
    max_tokens: Tokens = 160,
    repeats: Repeats = 3,
    threads: Threads = None,
    as_json: o.Json = False,
) -> None:
    """Many requests at once, or arriving at random."""
    from dinfer.bench.machine import Timing
    from dinfer.bench.traffic import arrivals, arriving

    found = _settings(threads)
    llm = opening.open(max_sequences=concurrency)
    prompts = prompts_of(llm, task, num)
    params = sampling.params(max_tokens=max_tokens)
    times = arrivals(num, rate, sampling.seed)
    arriving(llm, prompts[:concurrency], params, [0.0] * len(prompts[:concurrency]))
    runs = [arriving(llm, prompts, params, times) for _ in range(repeats)]
    figures = {
        "concurrency": concurrency,
        "rate": rate,
        "tokens_per_second": asdict(Timing.of([run.tokens_per_second for run in runs])),
        "seconds_per_request": asdict(Timing.of([x for run in runs for x in run.latency])),
        "seconds_to_first_text": asdict(Timing.of([x for run in runs for x in run.first])),
        "tokens_per_forward": runs[0].tokens / runs[0].forward_passes,
    }
    _show({"model": opening.model, **_model(llm.loaded), **figures, **found}, as_json)


def growth(
    model: Annotated[str, typer.Option("--model", "--shape", "-m", help=SHAPE)] = o.DEFAULT_MODEL,
    lengths: Annotated[str, typer.Option(help="New tokens, with commas.")] = "64,128,256,384",
    decoder: o.Decoder = "fixed:steps=8",
    cache: o.Cache = None,
    repeats: Repeats = 3,
    threads: Threads = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    quant: o.Quant = None,
    plot: Plot = None,
    as_json: o.Json = False,
) -> None:
    """Seconds per token against the length of the answer, every token generated."""
    from dinfer.bench.machine import Timing, interleaved
    from dinfer.bench.plot import lines
    from dinfer.bench.shape import open_any
    from dinfer.bench.traffic import one_at_a_time
    from dinfer.engine.llm import LLM
    from dinfer.request import SamplingParams

    found = _settings(threads)
    wanted = _numbers("--lengths", lengths)
    llm = LLM(open_any(model, dtype, device, quant), max_sequences=1)
    prompt = [5 + p % 50 for p in range(32)]

    def cost(length: int) -> float:
        params = SamplingParams(length, ignore_eos=True, decoder=decoder, cache=cache)
        return 1000 * one_at_a_time(llm, [prompt], params).seconds / length

    for length in wanted:
        cost(length)
    values = interleaved({str(n): partial(cost, n) for n in wanted}, repeats)
    figures = {name: asdict(Timing.of(each)) for name, each in values.items()}
    if plot is not None:
        medians = [figures[str(n)]["median"] for n in wanted]
        lines(plot, {model: (wanted, medians)}, "Cost of a token", "new tokens", "ms")
    _show({"model": model, "milliseconds_per_token": figures, **found}, as_json)


@dataclass(frozen=True)
class Rivalry:
    """The other side of `versus`."""

    fast_dllm: Annotated[
        Path | None, typer.Option(help="Fast-dLLM checkout; none: our baseline from its paper.")
    ] = None
    python: Annotated[
        str, typer.Option(help="Interpreter with transformers 4.x and einops for the checkout.")
    ] = sys.executable


@o.grouped
def versus(
    strategies: o.Strategies,
    rivalry: Rivalry,
    model: Annotated[str, typer.Option("--model", "--shape", "-m", help=SHAPE)] = "tiny-llada",
    task: Task = "math",
    num: Num = 100,
    max_tokens: Tokens = 160,
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Hold both sides to this (random weights: 4).")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Of ours, for throughput.")] = 32,
    repeats: Repeats = 2,
    threads: Threads = None,
    dtype: o.Dtype = "auto",
    compiled: o.Compiled = False,
    as_json: o.Json = False,
) -> None:
    """dInfer beside Fast-dLLM on the same weights, prompts and canvas: quality, forwards, speed."""
    from dinfer.bench.shape import SHAPES, open_any
    from dinfer.bench.versus import Canvas, duel
    from dinfer.engine.llm import LLM

    found = _settings(threads)
    loaded = open_any(model, dtype, "cpu")
    llm = LLM(loaded, max_sequences=concurrency, compiled=compiled)
    random = model in SHAPES
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
    console = Console(stderr=True, quiet=as_json)
    with ExitStack() as stack:
        rival = _rival(stack, rivalry, loaded, canvas)
        result = duel(llm, rival, prompts, params, repeats, lambda x: console.print(x, style="dim"))
    quality = {} if random else _quality(llm, task, num, result)
    head = {"model": model, **_model(loaded), "rival": rival.name, "mode": str(result.mode)}
    _show({**head, **quality, **result.figures(), "modes_tried": result.tried, **found}, as_json)


def _rival(stack: ExitStack, rivalry: Rivalry, loaded: "Loaded", canvas: "Canvas") -> "Rival":
    from dinfer.bench.shape import SHAPES, write_checkpoint
    from dinfer.bench.versus import Baseline, Original

    if rivalry.fast_dllm is None:
        return Baseline(loaded, canvas)
    folder = loaded.folder
    if loaded.name in SHAPES:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(loaded, folder)
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


def _settings(threads: int | None) -> dict[str, Any]:
    import torch

    from dinfer.bench.machine import settings

    torch.set_num_threads(threads or torch.get_num_threads())
    return settings()


def _model(loaded: "Loaded") -> dict[str, Any]:
    from importlib import import_module

    import torch

    from dinfer.engine.load import blank

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


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(box=None, show_header=False)
    for name, value in found.items():
        table.add_row(name, _said(value))
    Console().print(table)


def _said(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"median", "least", "most", "repeats"}:
        return "{median:.4g} ({least:.4g} to {most:.4g}, {repeats} times)".format(**value)
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_said(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
