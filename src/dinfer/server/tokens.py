"""/tokenize and /detokenize: what the model reads."""

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request

from dinfer.server.api_error import APIError, naming
from dinfer.server.app_state import AppState
from dinfer.server.chat import Messages, Tools, render
from dinfer.server.schemas import Name, Strict, TokenIds


class TokenizeBody(Strict):
    """Text as it stands (no template, no special tokens), or a conversation as chat renders it."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None


class Tokens(BaseModel):
    """Token ids and the model's context."""

    tokens: list[int]
    count: int
    context: int


class DetokenizeBody(Strict):
    """Token ids."""

    model: Name | None = None
    tokens: TokenIds


class Text(BaseModel):
    """Their text, special tokens included."""

    prompt: str


def tokenize(site: AppState, body: TokenizeBody) -> Tokens:
    """Ids of a body. Raises Refusal."""
    _, llm = site.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "Give either prompt or messages.", "prompt", "invalid_value")
    if body.messages is not None:
        ids = render(llm, body.messages, body.tools)
    else:
        with naming("prompt"):
            ids = llm.prompts.tokenizer.encode(body.prompt or "")
    return Tokens(tokens=ids, count=len(ids), context=llm.loaded.facts.context)


def add_to(app: FastAPI, site: AppState) -> None:
    """Registers the endpoints."""

    @app.post("/tokenize", tags=["tokens"])
    async def tokenize_(body: TokenizeBody, request: Request) -> Tokens:
        """Text or a conversation to token ids."""
        return await site.prepare(tokenize, body, request.scope)

    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeBody) -> Text:
        """Token ids to text."""
        _, llm = site.find(body.model)
        with naming("tokens"):
            return Text(prompt=llm.prompts.tokenizer.decode(body.tokens, skip_special=False))
