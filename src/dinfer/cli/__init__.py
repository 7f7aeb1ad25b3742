"""The command line. Heavy imports happen inside the commands, so `dinfer --help` is quick."""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import typer

from dinfer.cli import (
    batch,
    bench,
    bench_serving,
    compare,
    eval_train,
    generate,
    list_info,
    quantize,
    serve,
)
from dinfer.errors import DinferError

app = typer.Typer(
    name="dinfer",
    help="Inference for diffusion language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for _module in (generate, serve, batch, eval_train, compare, bench, bench_serving):
    _module.add_to(app)
for _module in (list_info, quantize):
    _module.add_to(app)


# The base of all errors of usage; typer does not export it, and versions keep it in other places.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Runs a command; what the user can mend is one sentence on standard error and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except DinferError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)
    except _UsageError as error:
        if said := usage(error, sys.argv[1:]):  # without any command, the help was shown
            sys.stderr.write(f"Error: {said}\n")
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


def usage(error: Any, words: Sequence[str]) -> str:
    """One sentence about an error of usage: what was given, what is allowed, where to look."""
    said = str(error.format_message()).strip().rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", [])
    pairs = [(*word.partition("="), after) for word, after in itertools.pairwise([*words, ""])]
    given = [value if sign else after for name, sign, value, after in pairs if name in options]
    if given and f"'{given[-1]}'" not in said:
        said += f"; {given[-1]!r} was given"
    command = f"{error.ctx.command_path} --help" if getattr(error, "ctx", None) else "--help"
    return f"{said} (see {command})." if said else ""
