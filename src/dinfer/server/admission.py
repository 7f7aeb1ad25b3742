"""Who may come in, and until when: the queue's limit, deadlines, and the drain at the end."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from dinfer.server.api_error import APIError


class Admission:
    """Counts the requests of one server in the engines; lives on the event loop.

    deadline: most seconds of a call, None = no limit.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.draining = False
        self._inside: dict[str, int] = {}
        self._scopes: set[anyio.CancelScope] = set()
        self._reading: set[anyio.CancelScope] = set()
        self._pace = 1.0  # seconds a request takes, a moving average

    @property
    def calls(self) -> int:
        """Calls being answered."""
        return len(self._scopes)

    def inside(self, model: str) -> int:
        """Requests of a model that came in and did not leave."""
        return self._inside.get(model, 0)

    @contextmanager
    def hold(
        self, model: str, count: int, room: int, timeout: float | None
    ) -> Iterator[anyio.CancelScope]:
        """Lets `count` requests in where there is room for them, until the block ends; its scope
        is cancelled at the deadline. Raises Refusal (429, 503) where they cannot come in.
        """
        if self.draining:
            raise self.closing()
        if self.inside(model) + count > room:
            wait = str(max(1, math.ceil(self._pace)))
            raise APIError(
                429,
                f"The queue of {model!r} is full; try again in {wait} s.",
                None,
                "queue_full",
                {"Retry-After": wait},
            )
        limits = [limit for limit in (timeout, self.deadline) if limit is not None]
        scope = anyio.CancelScope(deadline=anyio.current_time() + min(limits, default=math.inf))
        self._inside[model] = self.inside(model) + count
        self._scopes.add(scope)
        began = time.perf_counter()
        try:
            with scope:
                yield scope
        finally:
            self._scopes.discard(scope)
            self._inside[model] -= count
            self._pace += 0.1 * (time.perf_counter() - began - self._pace)

    @contextmanager
    def receiving(self, timeout: float | None) -> Iterator[None]:
        """While a client sends its body. Raises APIError: 408 after `timeout` seconds, 503 when
        the drain begins, since it does not wait for calls that have not begun.
        """
        if self.draining:
            timeout = min(timeout or math.inf, 1.0)
        with anyio.move_on_after(timeout) as scope:
            self._reading.add(scope)
            try:
                yield
            finally:
                self._reading.discard(scope)
        if scope.cancelled_caught and self.draining:
            raise self.closing()
        if scope.cancelled_caught:
            text = f"The body did not arrive within {timeout:g} seconds."
            raise APIError(408, text, None, "receive_timeout", {"Connection": "close"})

    def drain(self, seconds: float) -> None:
        """Lets nobody in any more, and gives those inside that long."""
        self.draining = True
        for scope in self._reading:
            scope.cancel()
        end = anyio.current_time() + seconds
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, end)

    def overdue(self) -> APIError:
        """Why a call was ended."""
        if self.draining:
            return self.closing()
        # OpenAI clients try again after a 408 unless they are told not to.
        once = {"x-should-retry": "false"}
        return APIError(408, "The call took longer than its deadline.", "timeout", "deadline", once)

    def closing(self) -> APIError:
        """What callers are told while the server shuts down."""
        return APIError(503, "The server is shutting down.", None, "closing", {"Retry-After": "5"})
