"""generate, chat and infill."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dinfer.cli import options as o
from dinfer.errors import RequestError
from dinfer.request import REPETITIVE, Output, SamplingParams, TextEvent

if TYPE_CHECKING:
    from dinfer.engine.llm import LLM

EXAMPLE = (
    "Tom has 12 apples. Then he buys 7 more. Later he loses 4 of them."
    " How many apples does Tom have now?"
)


Answers = Callable[[list[dict[str, str]]], Iterator[TextEvent]]


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command(epilog=f'Example: dinfer generate "{EXAMPLE}" --watch')(generate)
    app.command(epilog="Example: dinfer chat --model tiny-sdar")(chat)
    app.command(epilog='Example: dinfer infill "Add 7: 12+7=[BLANK:2]." --model tiny-llada')(infill)


@o.grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    opening: o.Opening,
    sampling: o.Sampling,
    max_tokens: o.MaxTokens = 128,
    n: Annotated[int, typer.Option("-n", help="Answers to give.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")] = None,
    suffix: Annotated[str | None, typer.Option(help="Fixed text after the answer.")] = None,
    watch: o.Watch = False,
    as_json: o.Json = False,
) -> None:
    """Answers one prompt."""
    params = sampling.params(max_tokens=max_tokens, stop=tuple(stop or ()), n=n)
    llm = opening.open()
    text = _read() if prompt == "-" else prompt
    with _watcher(llm, watch and n == 1, max_tokens) as on_event:
        outputs = llm.generate(text, params, suffix, on_event)
    if as_json:
        found = [as_dict(output) for output in outputs]
        typer.echo(json.dumps(found[0] if n == 1 else found, ensure_ascii=False))
        return
    for output in outputs:
        typer.echo(output.text)
        say_cost(output)


@o.grouped
def chat(
    opening: o.Opening,
    sampling: o.Sampling,
    server: o.Server,
    context: typer.Context,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: o.MaxTokens = 128,
) -> None:
    """A conversation, a line a turn; an empty line or end of input leaves it."""
    params = sampling.params(max_tokens=max_tokens)
    messages = [{"role": "system", "content": system}] if system else []
    if server.server is None:
        llm = opening.open()
        llm.prompts.chat([*messages, {"role": "user", "content": ""}])  # refused now, not later
        answers: Answers = partial(_answer, llm, params)
    else:
        answers = partial(server.send, server.asked(context, opening), params=params)
    while line := _ask():
        messages.append({"role": "user", "content": line})
        answer = ""
        for event in answers(messages):
            answer += event.text
            typer.echo(event.text, nl=False)
        typer.echo()
        messages.append({"role": "assistant", "content": answer})


def _answer(
    llm: "LLM", params: SamplingParams, messages: list[dict[str, str]]
) -> Iterator[TextEvent]:
    events = llm.stream(llm.prompts.chat(messages), params)
    return (event for event in events if isinstance(event, TextEvent))


@o.grouped
def infill(
    text: Annotated[str, typer.Argument(help="Text with holes, [BLANK:n] for n tokens.")],
    opening: o.Opening,
    sampling: o.Sampling,
    prompt: Annotated[str, typer.Option(help="What comes before the text.")] = "",
    as_json: o.Json = False,
) -> None:
    """Fills the holes of a text; what is given stays as it is."""
    params = sampling.params()
    output = opening.open().infill(text, params, prompt)
    if as_json:
        typer.echo(json.dumps(as_dict(output), ensure_ascii=False))
        return
    typer.echo(output.text)
    say_cost(output)


def as_dict(output: Output) -> dict[str, Any]:
    """An output for JSON, with the derived figures."""
    found = dataclasses.asdict(output)
    found["stats"]["tokens_per_forward"] = output.stats.tokens_per_forward
    found["usage"]["total_tokens"] = output.usage.total_tokens
    return found


def say_cost(output: Output) -> None:
    """One dim line about what the answer cost, on standard error."""
    stats = output.stats
    circles = ", repeats itself" if stats.repetition >= REPETITIVE else ""
    line = (
        f"{output.usage.completion_tokens} tokens, {stats.forward_passes} forwards"
        f" ({stats.tokens_per_forward:.1f} tokens each), {stats.seconds:.2f} s{circles}"
    )
    Console(stderr=True).print(line, style="dim", highlight=False)


def _watcher(llm: "LLM", wanted: bool, length: int) -> Any:
    from dinfer.cli.watch import Watcher

    return Watcher(Console(), llm.prompts.tokenizer, length) if wanted else nullcontext()


def _read() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"Standard input is not valid {error.encoding} (byte {error.start}); give text."
        ) from error


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return ""
