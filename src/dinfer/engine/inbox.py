"""Events of one engine for several callers: who waits runs the next step, and each caller gets the
events of its own requests.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dinfer.engine.engine import Engine, EngineEvent, Event
from dinfer.errors import EngineError
from dinfer.request import FailureEvent, Request, TextEvent

Inbox = deque[EngineEvent]


class Inboxes:
    """The inboxes of all open calls. Safe from several threads and from nested calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._inboxes: dict[str, Inbox] = {}
        self._stepping = False
        self._gone: list[str] = []
        self._process = os.getpid()

    @contextmanager
    def serve(self, requests: Sequence[Request]) -> Iterator[Iterator[Event]]:
        """The events of the requests until each has its output. Leaving early aborts those that
        still run. Raises RequestError if one is refused, and what made one fail.
        """
        check_process(self._process)
        inbox: Inbox = deque()
        try:
            with self._lock:
                for request in requests:
                    self._engine.add(request)
                    self._inboxes[request.id] = inbox
            yield self._events(inbox, {request.id for request in requests})
        finally:
            with self._lock:
                for request in requests:
                    # An id that was refused because it is in use belongs to another call.
                    if self._inboxes.get(request.id) is inbox:
                        del self._inboxes[request.id]
                        self._gone.append(request.id)
                self._abort_gone()

    def _abort_gone(self) -> None:
        """Aborts what callers left, but never within a step: the garbage collector may close a
        generator at any time.
        """
        while self._gone and not self._stepping:
            self._engine.abort(self._gone.pop())

    def _events(self, inbox: Inbox, left: set[str]) -> Iterator[Event]:
        while left:
            event = self._next(inbox)
            if isinstance(event, FailureEvent):
                raise event.error
            if isinstance(event, TextEvent) and event.output is not None:
                left.discard(event.id)
            yield event

    def _next(self, inbox: Inbox) -> EngineEvent:
        """The next event for an inbox; runs steps until there is one."""
        with self._lock:
            while not inbox:
                if not self._engine.busy:
                    raise EngineError("The engine has no request left and an answer is missing.")
                for event in self._step():
                    if event.id in self._inboxes:
                        self._inboxes[event.id].append(event)
            return inbox.popleft()

    def _step(self) -> list[EngineEvent]:
        self._stepping = True
        try:
            return self._engine.step()
        finally:
            self._stepping = False
            self._abort_gone()


def check_process(made_in: int) -> None:
    """Raises EngineError in a forked child: threads and locks of the parent are not there."""
    if os.getpid() != made_in:
        raise EngineError(
            "This model was loaded before the process was forked, which does not work; load it in"
            " the child, or start processes with the method 'spawn'."
        )
