"""`AsyncLLM`: the same engine for asyncio: many callers, one thread that steps."""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dinfer.engine.base_llm import BaseLLM
from dinfer.engine.engine import Engine, EngineEvent, Event
from dinfer.engine.inbox import check_process
from dinfer.engine.input_processor import Prompt
from dinfer.errors import EngineError, RequestError
from dinfer.loader.load import Loaded
from dinfer.request import FailureEvent, Output, Request, SamplingParams, TextEvent

log = logging.getLogger("dinfer")
Listener = Callable[[EngineEvent], None]


class EngineThread:
    """The one thread that touches an engine; the others leave it commands."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._lock = threading.Lock()
        self._stopped: EngineError | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="dinfer-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Adds a request; `listener` is called from the engine's thread with its events, or with
        the error. Raises EngineError when the thread has ended.
        """
        check_process(self._process)
        with self._lock:
            if self._stopped is not None:
                raise self._stopped
            if request.id in self._listeners:
                raise RequestError(f"A request with the id {request.id!r} is already being served.")
            self._listeners[request.id] = listener
            self._commands.put(partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step."""
        self._commands.put(lambda: self._tell(self._engine.abort(request_id)))

    @property
    def alive(self) -> bool:
        """Whether the thread still takes requests."""
        return self._stopped is None and self._thread.is_alive()

    def close(self) -> None:
        """Stops the thread after the step it is in; callers that still wait get an EngineError."""
        self._commands.put(None)
        if os.getpid() == self._process:
            self._thread.join()

    def _work(self) -> None:
        error = EngineError("The engine was closed.")
        try:
            self._serve()
        except BaseException as cause:
            error = EngineError(f"The engine has stopped: {type(cause).__name__}: {cause}")
            log.critical("the engine's thread has ended", exc_info=cause)
        finally:
            self._stop(error)

    def _serve(self) -> None:
        while True:
            try:
                # With nothing to run the thread sleeps until somebody wants something.
                command = self._commands.get(block=not self._engine.busy)
            except queue.Empty:
                command = self._step
            if command is None:
                return
            try:
                command()
            except Exception as error:
                log.exception("the engine failed")
                self._fail(error)

    def _step(self) -> None:
        self._tell(self._engine.step())

    def _fail(self, error: Exception) -> None:
        """Ends every request with that error; the engine is then empty and goes on."""
        for request_id in list(self._listeners):
            self._engine.abort(request_id)
            self._tell([FailureEvent(request_id, error)])

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except Exception as error:
            self._tell([FailureEvent(request.id, error)])

    def _tell(self, events: list[EngineEvent]) -> None:
        for event in events:
            last = isinstance(event, FailureEvent) or (
                isinstance(event, TextEvent) and event.output is not None
            )
            with self._lock:
                get = self._listeners.pop if last else self._listeners.get
                listener = get(event.id, None)
            if listener is not None:
                listener(event)

    def _stop(self, error: EngineError) -> None:
        """Tells everybody who waits, and all who come later, that there is no engine any more."""
        with self._lock:
            self._stopped = error
            listeners, self._listeners = self._listeners, {}
        for request_id, listener in listeners.items():
            listener(FailureEvent(request_id, error))
        with suppress(Exception):
            for request_id in listeners:
                self._engine.abort(request_id)


class AsyncLLM(BaseLLM):
    """A diffusion language model for many asyncio callers; takes the arguments of `BaseLLM`. Of
    `engine`, callers may use `check` and read figures; all else is its thread's.
    """

    def __init__(self, model: str | Loaded, **options: Any) -> None:
        super().__init__(model, **options)
        self._thread = EngineThread(self.engine)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.alive

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Event]:
        """Events of one request as they come. Leaving the loop early frees the request within one
        step.
        """
        (request,) = self.prompts.complete(prompt, replace(params or SamplingParams(), n=1))
        async for event in self.serve(request):
            yield event

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Output]:
        """Answers to one prompt, `params.n` of them."""
        whole = self.prompts.complete(prompt, params or SamplingParams())
        requests = [replace(request, quiet=True) for request in whole]
        outputs: dict[str, Output] = {}
        async with aclosing(self.serve(*requests)) as events:
            async for event in events:
                if isinstance(event, TextEvent) and event.output is not None:
                    outputs[event.id] = event.output
        return [outputs[request.id] for request in requests]

    async def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None, **variables: Any
    ) -> list[Output]:
        """Answers to a conversation, `params.n` of them."""
        return await self.generate(self.prompts.chat(messages, **variables), params)

    async def serve(self, *requests: Request) -> AsyncGenerator[Event]:
        """Events of prepared requests as they come; leaving early frees those that still run."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[EngineEvent] = asyncio.Queue()

        def listener(event: EngineEvent) -> None:
            # A caller whose loop has ended no longer listens.
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        left: set[str] = set()
        try:
            for request in requests:
                self._thread.submit(request, listener)
                left.add(request.id)
            while left:
                event = await events.get()
                if isinstance(event, FailureEvent):
                    left.discard(event.id)
                    raise event.error
                if isinstance(event, TextEvent) and event.output is not None:
                    left.discard(event.id)
                yield event
        finally:
            for request_id in left:
                self._thread.abort(request_id)

    def close(self) -> None:
        """Stops the engine's thread."""
        self._thread.close()
