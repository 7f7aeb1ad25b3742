"""serve."""

import gc
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dinfer import __version__
from dinfer.cli import options as o
from dinfer.errors import RequestError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(epilog="Example: dinfer serve tiny-sdar tiny-llada --port 8000")(serve)


Keys = Annotated[
    str | None,
    typer.Option(
        envvar="DINFER_API_KEYS",
        show_envvar=True,
        help="Keys, with commas between them; best given in the environment.",
    ),
]


@dataclass(frozen=True)
class Bounds:
    """What a call may take; the names are those of Settings."""

    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a call's body.")] = 2**20
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait, per model.")] = 256
    max_choices: Annotated[
        int, typer.Option(min=1, max=1024, help="Answers that one call may ask for.")
    ] = 16
    max_request: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of prompt and answer together.")
    ] = None
    deadline: Annotated[float, typer.Option(min=0.001, help="Seconds that a call may take.")] = (
        600.0
    )
    receive_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds in which headers, and a body, must arrive.")
    ] = 30.0


@dataclass(frozen=True)
class Listening:
    """Where calls come in, and how long they may still take when the server is told to stop."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that calls in progress have after SIGTERM.")
    ] = 30.0


@dataclass(frozen=True)
class Browsers:
    """Which names and pages browsers may use to reach the server."""

    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A further name for the Host header. Without keys, on a loopback address, only"
            " --host and names of this machine are served."
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of a page that browsers let call this server (CORS); '*' = any."),
    ] = None


@o.grouped
def serve(
    listening: Listening,
    browsers: Browsers,
    bounds: Bounds,
    loading: o.Loading,
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Names, folders or hub ids; NAME=FOLDER gives a name to be asked by."),
    ] = None,
    api_keys: Keys = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="A file with a key in each line; lines that start with # are comments."),
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Requests in one step.")] = 64,
    max_rows: o.MaxRows = None,
) -> None:
    """Serves models over HTTP: the OpenAI protocol, infilling, and a page to watch the canvas."""
    try:
        from dinfer.server.app import create_app
        from dinfer.server.app_state import Settings
        from dinfer.server.log import JsonLines
        from dinfer.server.run import bind, run
    except ModuleNotFoundError as error:
        text = f"dinfer serve needs {error.name}; install the extra: pip install 'dinfer[server]'."
        raise RequestError(text) from error
    from dinfer.engine.async_llm import AsyncLLM

    sources = named(models or [o.DEFAULT_MODEL])
    if loading.lora is not None and len(sources) > 1:
        raise RequestError(
            f"--lora is given with {len(sources)} models; an adapter belongs to one of them."
        )
    keys = read_keys(api_keys, api_key_file)
    origins = tuple(browsers.allow_origin or ())
    hosts = allowed_hosts(listening.host, keys, browsers.allow_host or [])
    settings = Settings(keys, hosts, origins, **vars(bounds))
    log_to(JsonLines())
    bound = bind(listening.host, listening.port)
    with bound, ExitStack() as stack:
        served = {}
        for name, source in sources.items():
            limits = {"max_sequences": max_sequences, "max_rows": max_rows}
            served[name] = AsyncLLM(source, **limits, **vars(loading))
            stack.callback(served[name].close)

        def announce(address: str) -> None:
            open_to_all = (
                "" if keys or listening.host in LOOPBACK else ", open to everyone without a key"
            )
            names = ", ".join(served)
            line = f"dInfer {__version__} listens on {address} and serves {names}{open_to_all}"
            typer.echo(line, err=True)

        app = create_app(served, settings)
        # What is there now stays: the garbage collector need not look at it again.
        gc.collect()
        gc.freeze()
        run(app, bound, listening.drain, announce)


def log_to(lines: logging.Formatter) -> None:
    """Sends the log to standard error in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(lines)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def named(models: list[str]) -> dict[str, str]:
    """Name -> source: `NAME=FOLDER`, or a source whose last part is its name unless it is a hub
    id.
    """
    found: dict[str, str] = {}
    for given in models:
        name, sign, source = given.partition("=")
        if not sign:
            name, source = (Path(given).name if os.path.exists(given) else given), given
        if not name or not source:
            raise RequestError(f"The model {given!r} is no NAME=FOLDER, name, folder or hub id.")
        if name in found:
            raise RequestError(f"Two models have the name {name!r}; write NAME=FOLDER.")
        found[name] = source
    return found


def allowed_hosts(host: str, keys: tuple[str, ...], more: list[str]) -> tuple[str, ...]:
    """Names for the Host header, none = any. Without keys on a loopback address, a page of another
    name that leads here is kept out (DNS rebinding).
    """
    if "*" in more or not (more or (host in LOOPBACK and not keys)):
        return ()
    known = {"localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host}
    return tuple(sorted(known | set(more)))


def read_keys(given: str | None, file: Path | None) -> tuple[str, ...]:
    """The API keys of the option or environment and of the file."""
    # The command line's parser takes an empty variable for none; here it is a mistake: a secret
    # that was never set must not open the server.
    given = os.environ.get("DINFER_API_KEYS") if given is None else given
    keys = [key.strip() for key in (given or "").split(",")]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
            keys += [line for line in lines if not line.startswith("#")]
        except (OSError, ValueError) as error:
            raise RequestError(f"The API key file {file} cannot be read: {error}.") from error
    found = tuple(key for key in keys if key)
    if not found and (given is not None or file is not None):
        raise RequestError("API keys were asked for, but none was given.")
    if any(not key.isascii() or not key.isprintable() for key in found):
        raise RequestError("An API key holds something else than printable ASCII characters.")
    return found
