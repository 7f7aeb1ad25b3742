"""Runs an application on a socket until it is told to stop."""

import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from dinfer.errors import RequestError
from dinfer.server.admission import Admission

AFTER_DRAIN = 5
"""Seconds that clients have to take their last events once the drain is over."""


def run(app: FastAPI, host: str, port: int, drain: float, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT; then takes nobody in any more, and calls in progress have
    `drain` seconds. port 0 takes any free one. `announce` gets the address once it listens.
    Raises RequestError where it cannot listen there.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise RequestError(f"Cannot listen on {host}, port {port}: {error}.") from error
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=int(drain) + AFTER_DRAIN,
    )
    # The signal is raised again after the shutdown; by then there is nothing left to end.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with listening:
            where = listening.getsockname()[1]
            name = f"[{host}]" if ":" in host else host
            server = _Server(config, app.state.site.gate, drain)
            server.announce = lambda: announce(f"http://{name}:{where}")
            server.run(sockets=[listening])
    finally:
        signal.signal(signal.SIGTERM, before)


class _Server(uvicorn.Server):
    """Says when it listens, and drains before it shuts down."""

    announce: Callable[[], None]

    def __init__(self, config: uvicorn.Config, gate: Admission, drain: float) -> None:
        super().__init__(config)
        self._gate, self._drain = gate, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        await super().startup(sockets)
        self.announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains and stops."""
        self._gate.drain(self._drain)
        await super().shutdown(sockets)
