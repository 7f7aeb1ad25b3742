"""What one server is made of; every endpoint gets it, so there are no globals."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from starlette.types import Scope

from dinfer.engine.async_llm import AsyncLLM
from dinfer.registry import near
from dinfer.request import Request
from dinfer.server.admission import Admission
from dinfer.server.api_error import APIError, naming
from dinfer.server.metrics import Metrics

Body = TypeVar("Body")
Made = TypeVar("Made")

LONG_BODY = 32 * 1024
"""Bytes from which a body takes its turn to be read by a tokenizer: it may take seconds."""


@dataclass(frozen=True)
class Settings:
    """How a server is run.

    keys: API keys; none = open. hosts: names that the Host header may have; none = any. origins:
    origins of pages that browsers let in (CORS). max_body: bytes of a call's body. max_queue:
    requests that may wait, per model. max_choices: answers that one call may ask for. max_request:
    most tokens (prompt and answer) of one request, None = the model's context. deadline: most
    seconds of a call, None = no limit. receive_timeout: seconds that a client has to send its
    headers and its body, None = no limit.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body: int = 2**20
    max_queue: int = 256
    max_choices: int = 16
    max_request: int | None = None
    deadline: float | None = 600.0
    receive_timeout: float | None = 30.0


@dataclass(frozen=True)
class AppState:
    """Models by name, settings, the gate and the figures."""

    models: Mapping[str, AsyncLLM]
    settings: Settings
    gate: Admission
    metrics: Metrics
    _long_bodies: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))

    def find(self, name: str | None) -> tuple[str, AsyncLLM]:
        """A model by its name; without one, the first. Raises APIError (404, or 503 where its
        engine has stopped).
        """
        if name is None:
            name = next(iter(self.models))
        if name not in self.models:
            known = near(name, list(self.models))
            raise APIError(404, f"Unknown model {name!r}.{known}", "model", "model_not_found")
        if not self.models[name].alive:
            raise APIError(503, f"The engine of {name!r} has stopped.", "model", "stopped")
        return name, self.models[name]

    async def prepare(
        self, work: Callable[["AppState", Body], Made], body: Body, scope: Scope
    ) -> Made:
        """`work(self, body)` in a thread. Long bodies run one at a time there, so that short ones
        find a thread and a core. Raises APIError: 429 where too many long ones wait, 408 at the
        deadline.
        """
        limiter = None
        if scope.get("dinfer.size", 0) > LONG_BODY:
            limiter = self._long_bodies
            if limiter.statistics().tasks_waiting >= self.settings.max_queue:
                raise APIError(
                    429,
                    "Too many long prompts wait to be read; try again in 5 s.",
                    None,
                    "queue_full",
                    {"Retry-After": "5"},
                )
        try:
            with anyio.fail_after(self.settings.deadline):
                return await anyio.to_thread.run_sync(work, self, body, limiter=limiter)
        except TimeoutError:
            raise self.gate.overdue() from None

    def room(self, llm: AsyncLLM) -> int:
        """Requests of a model that may be inside: running and waiting."""
        return llm.engine.scheduler.max_sequences + self.settings.max_queue

    def check_count(self, llm: AsyncLLM, count: int) -> None:
        """Refuses a call that asks for more answers than one call may, or than may be inside."""
        most = min(self.settings.max_choices, self.room(llm))
        if count > most:
            raise APIError(
                400,
                f"The call asks for {count} answers; this server gives at most {most} per call.",
                "n",
                "too_many_answers",
            )

    def check(self, llm: AsyncLLM, request: Request, param: str, length: str | None = None) -> None:
        """Refuses a request that the engine or the server's limits will never allow. param: the
        field that holds its prompt; length: the one that holds the length of its answer.
        """
        with naming("cache"):
            llm.engine.strategy(request.params)
        with naming(param, length):
            llm.engine.check(request)
        most = self.settings.max_request
        if most is not None and len(request.canvas) > most:
            raise APIError(
                400,
                f"Prompt and answer have {len(request.canvas)} tokens; this server takes {most}"
                " per request.",
                param,
                "context_length_exceeded",
            )
