"""/v1/models and /v1/strategies: what a request can choose from."""

import dataclasses
import inspect
import time
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel

from dinfer import registry
from dinfer.server.app_state import AppState

Option = bool | int | float | str | None


class ModelBody(BaseModel):
    """A model; what stands below `owned_by` is an addition to the protocol."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    family: str
    context: int
    block_length: int | None
    chat: bool
    decoder: str
    cache: str
    iteration: str


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelBody]


class StrategyBody(BaseModel):
    """A strategy: a spec is `name` or `name:option=value:...`; options with their defaults."""

    name: str
    about: str
    options: dict[str, Option]


class Strategies(BaseModel):
    """All strategies, by kind."""

    decoder: list[StrategyBody]
    cache: list[StrategyBody]
    iteration: list[StrategyBody]


def strategies(kind: str) -> list[StrategyBody]:
    """All of a kind."""
    found = []
    for name in registry.names(kind):
        cls = registry.find(kind, name)
        about = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
        options: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(cls)}
        found.append(StrategyBody(name=name, about=about, options=options))
    return found


def add_to(app: FastAPI, site: AppState) -> None:
    """Registers the endpoints."""
    created = int(time.time())

    def describe(name: str) -> ModelBody:
        loaded = site.models[name].loaded
        facts = loaded.facts
        return ModelBody(
            id=name,
            created=created,
            owned_by="dinfer",
            family=loaded.family,
            context=facts.context,
            block_length=facts.block_length,
            chat=loaded.template is not None,
            decoder=facts.decoder,
            cache=facts.cache,
            iteration=facts.iteration,
        )

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> ModelList:
        """All models."""
        return ModelList(data=[describe(name) for name in site.models])

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def model(model: str) -> ModelBody:
        """One model."""
        return describe(site.find(model)[0])

    @app.get("/v1/strategies", tags=["canvas"])
    async def all_strategies() -> Strategies:
        """All decoders, caches and iterations."""
        return Strategies(**{kind: strategies(kind) for kind in registry.STRATEGIES})
