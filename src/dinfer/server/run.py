"""Runs an application on a socket until it is told to stop."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from dinfer.errors import RequestError
from dinfer.server.admission import Admission

AFTER_DRAIN = 5
"""Seconds that clients have to take their last events once the drain is over."""
BACKLOG = 128
"""Connections that wait to be accepted; asyncio accepts as many each time it wakes up."""


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, which does not listen yet: so an address that is taken is known
    before models are loaded. port 0 takes any free one. Raises RequestError where it cannot be had.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":  # on Windows this lets two servers share a port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if found.family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise RequestError(f"Cannot listen on {host}, port {port}: {error}.") from error
    return found


def run(app: FastAPI, bound: socket.socket, drain: float, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT; then takes nobody in any more, and calls in progress have
    `drain` seconds. `announce` gets the address once it listens.
    """
    _raise_file_limit()
    logging.getLogger("asyncio").addFilter(_OncePerInterval())
    config = uvicorn.Config(
        app,
        http=_protocol(app.state.site.settings.receive_timeout),
        backlog=BACKLOG,
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
        with bound:
            host, port = bound.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            server = _Server(config, app.state.site.gate, drain)
            server.announce = lambda: announce(f"http://{name}:{port}")
            server.run(sockets=[bound])
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


def _protocol(seconds: float | None) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a time limit for the headers of a request, for which it would
    wait for ever: counted from the start of the connection, or from the first byte of a later one.
    """
    if seconds is None:
        return AutoHTTPProtocol
    limit = seconds

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waiting = self.cycle is None or self.cycle.response_complete
            if not waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            elif waiting and self._timer is None:
                self._expect_headers()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            if self._timer is not None:
                self._timer.cancel()

        def _expect_headers(self) -> None:
            self._timer = asyncio.get_running_loop().call_later(limit, self.transport.close)

    return Protocol


def _raise_file_limit() -> None:
    """Takes as many open files, and so connections, as the system allows; 1,024 is usual else."""
    try:
        import resource  # not on Windows
    except ModuleNotFoundError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS names no real number as the hard limit
            logging.getLogger("dinfer.server").warning("at most %d files can be open", soft)


class _OncePerInterval(logging.Filter):
    """Lets asyncio say every ten seconds that no connection can be accepted, not each time."""

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if "out of system resource" not in record.getMessage():
            return True
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + 10
        return True
