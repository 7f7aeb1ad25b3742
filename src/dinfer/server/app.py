"""`create_app`: models, settings and endpoints become one ASGI application. No globals."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from dinfer import __version__
from dinfer.engine.async_llm import AsyncLLM
from dinfer.server import api_error, chat, completion, health, infill, tokens, web_ui
from dinfer.server import models as model_routes
from dinfer.server.admission import Admission
from dinfer.server.api_error import ErrorReply
from dinfer.server.app_state import AppState, Settings
from dinfer.server.auth import Access
from dinfer.server.metrics import Metrics

REFUSALS = {
    400: "A field is wrong; the error names it.",
    401: "The API key is missing or wrong.",
    403: "The Host header names another server.",
    404: "There is no such model.",
    408: "The deadline passed, or the body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; Retry-After says when to come back.",
    503: "The server is shutting down or its engine has stopped.",
}


def create_app(models: Mapping[str, AsyncLLM], settings: Settings | None = None) -> FastAPI:
    """The application over running models, by name; the first is the default. The caller closes
    them. `app.state.site` holds what it is made of.
    """
    chosen = settings or Settings()
    site = AppState(models, chosen, Admission(chosen.deadline), Metrics(models))
    app = FastAPI(
        title="dInfer",
        version=__version__,
        summary="Inference for diffusion language models, in the OpenAI protocol and beyond it.",
        docs_url=None,  # those pages load their scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # would put the caller's Host into the new address
        responses={code: {"model": ErrorReply, "description": t} for code, t in REFUSALS.items()},
    )
    app.state.site = site
    app.add_middleware(Access, site=site)
    if chosen.origins:  # around the key: browsers ask without it first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=chosen.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    api_error.add_to(app)
    for part in (completion, chat, infill, tokens, model_routes, health):
        part.add_to(app, site)
    web_ui.add_to(app)
    _without_422(app)
    return app


def _without_422(app: FastAPI) -> None:
    """FastAPI promises 422 for wrong bodies; here they are answered with 400."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
