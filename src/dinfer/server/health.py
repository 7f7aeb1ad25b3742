"""/health, /ready and /metrics, for whoever runs the server."""

from typing import Literal

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from dinfer.server.api_error import APIError
from dinfer.server.app_state import AppState


class State(BaseModel):
    """All is well."""

    status: Literal["ok"] = "ok"


class _Figures(Response):
    media_type = "text/plain"


def add_to(app: FastAPI, site: AppState) -> None:
    """Registers the endpoints."""

    @app.get("/health", tags=["operation"])
    async def health() -> State:
        """Whether the engines run."""
        dead = [name for name, llm in site.models.items() if not llm.alive]
        if dead:
            raise APIError(503, f"The engine of {', '.join(dead)} has stopped.", code="stopped")
        return State()

    @app.get("/ready", tags=["operation"])
    async def ready() -> State:
        """Whether new calls are taken."""
        if site.gate.draining:
            raise site.gate.closing()
        return await health()

    @app.get("/metrics", tags=["operation"], response_class=_Figures)
    async def metrics() -> Response:
        """Figures in Prometheus' text form."""
        return Response(site.metrics.text(), media_type=CONTENT_TYPE_LATEST)
