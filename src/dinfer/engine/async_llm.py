"""`AsyncLLM`: the same engine for asyncio: many callers, one thread that steps."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from dinfer.engine.base_llm import BaseLLM
from dinfer.engine.engine import Engine, Event
from dinfer.engine.input_processor import Prompt
from dinfer.loader.load import Loaded
from dinfer.request import Output, Request, SamplingParams, TextEvent

Listener = Callable[[Event | BaseException], None]


class EngineThread:
    """The one thread that touches an engine; the others leave it commands."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._thread = threading.Thread(target=self._work, name="dinfer-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Adds a request; `listener` is called from the engine's thread with its events, or with
        the error.
        """

        def add() -> None:
            try:
                self._engine.add(request)
            except ValueError as error:
                listener(error)
            else:
                self._listeners[request.id] = listener

        self._commands.put(add)

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step."""
        self._commands.put(lambda: self._tell(self._engine.abort(request_id)))

    @property
    def alive(self) -> bool:
        """Whether the thread still takes requests."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stops the thread after the step it is in."""
        self._commands.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                # With nothing to run the thread sleeps until somebody wants something.
                command = self._commands.get(block=not self._engine.busy)
            except queue.Empty:
                try:
                    self._tell(self._engine.step())
                except Exception as error:
                    self._fail(error)
                continue
            if command is None:
                return
            command()

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            listener = self._listeners.get(event.id)
            if isinstance(event, TextEvent) and event.output is not None:
                self._listeners.pop(event.id, None)
            if listener is not None:
                listener(event)

    def _fail(self, error: Exception) -> None:
        """A step that raised ends every request with that error; the engine is then empty and goes
        on.
        """
        for request_id, listener in list(self._listeners.items()):
            self._engine.abort(request_id)
            listener(error)
        self._listeners.clear()


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
        return list(await asyncio.gather(*(self._last(request) for request in requests)))

    async def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None, **variables: Any
    ) -> list[Output]:
        """Answers to a conversation, `params.n` of them."""
        return await self.generate(self.prompts.chat(messages, **variables), params)

    async def serve(self, *requests: Request) -> AsyncGenerator[Event]:
        """Events of prepared requests as they come; leaving early frees those that still run."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | BaseException] = asyncio.Queue()

        def listener(event: Event | BaseException) -> None:
            # A caller whose loop has ended no longer listens.
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        for request in requests:
            self._thread.submit(request, listener)
        left = {request.id for request in requests}
        try:
            while left:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, TextEvent) and event.output is not None:
                    left.discard(event.id)
                yield event
        finally:
            for request_id in left:
                self._thread.abort(request_id)

    def close(self) -> None:
        """Stops the engine's thread."""
        self._thread.close()

    async def _last(self, request: Request) -> Output:
        async for event in self.serve(request):
            if isinstance(event, TextEvent) and event.output is not None:
                return event.output
        raise AssertionError("a request ends with its output")
