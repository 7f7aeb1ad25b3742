"""What one server is made of; every endpoint gets it, so there are no globals."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dinfer.engine.async_llm import AsyncLLM
from dinfer.registry import near
from dinfer.request import Request
from dinfer.server.admission import Admission
from dinfer.server.api_error import APIError, naming
from dinfer.server.metrics import Metrics


@dataclass(frozen=True)
class Settings:
    """How a server is run.

    keys: API keys; none = open. max_body: bytes of a call's body. max_queue: requests that may
    wait, per model. max_request: most tokens (prompt and answer) of one request, None = the
    model's context. deadline: most seconds of a call, None = no limit.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    max_body: int = 2**20
    max_queue: int = 256
    max_request: int | None = None
    deadline: float | None = None


@dataclass(frozen=True)
class AppState:
    """Models by name, settings, the gate and the figures."""

    models: Mapping[str, AsyncLLM]
    settings: Settings
    gate: Admission
    metrics: Metrics

    def find(self, name: str | None) -> tuple[str, AsyncLLM]:
        """A model by its name; without one, the first. Raises Refusal (404)."""
        if name is None:
            return next(iter(self.models.items()))
        if name not in self.models:
            known = near(name, list(self.models))
            raise APIError(404, f"Unknown model {name!r}.{known}", "model", "model_not_found")
        return name, self.models[name]

    def room(self, llm: AsyncLLM) -> int:
        """Requests of a model that may be inside: running and waiting."""
        return llm.engine.scheduler.max_sequences + self.settings.max_queue

    def check_count(self, llm: AsyncLLM, count: int) -> None:
        """Refuses a call that asks for more answers than may ever be inside."""
        if count > self.room(llm):
            raise APIError(
                400,
                f"The call asks for {count} answers; this server takes {self.room(llm)} at once.",
                "n",
                "too_many_answers",
            )

    def check(self, llm: AsyncLLM, request: Request, param: str) -> None:
        """Refuses a request that the engine or the server's limits will never allow. param: the
        field that its length comes from.
        """
        with naming("cache"):
            llm.engine.strategy(request.params)
        too_long = len(request.canvas) > llm.loaded.facts.context
        with naming(param, "context_length_exceeded" if too_long else None):
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
