"""The command line. Heavy imports happen inside the commands, so `dinfer --help` is quick."""

import sys

import typer

from dinfer.cli import measure, show, write
from dinfer.errors import DinferError

app = typer.Typer(
    name="dinfer",
    help="Inference for diffusion language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for _module in (write, measure, show):
    _module.add_to(app)


def main() -> None:
    """Runs a command; what the user can mend is one sentence on standard error and exit code 2."""
    try:
        app()
    except DinferError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
