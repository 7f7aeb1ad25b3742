"""Errors in the shape that OpenAI clients know: `{"error": {message, type, param, code}}`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from dinfer.errors import ContextLengthError, DinferError
from dinfer.registry import near

MOST_SHOWN = 2000
"""Characters of an error's text: it may repeat what the caller sent."""
TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}


class ErrorBody(BaseModel):
    """What went wrong: one sentence, the kind, the field, a short name for machines."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorBody


class APIError(Exception):
    """An answer that is an error. param: the field at fault. code: a short name for machines."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message, param = _clipped(message), param and _clipped(param)
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def json(self) -> str:
        """The body; plain ASCII, since a client may have sent half a surrogate pair."""
        return json.dumps(self.body)

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.json(), self.status, self.headers, "application/json")


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."


@contextmanager
def naming(param: str, length: str | None = None) -> Iterator[None]:
    """Turns what the caller can mend into a 400 that names the field. length: the field to name
    where the prompt alone would fit into the context.
    """
    try:
        yield
    except ContextLengthError as error:
        field = length if length and error.prompt_fits else param
        raise APIError(400, str(error), field, "context_length_exceeded") from error
    except DinferError as error:
        raise APIError(400, str(error), param) from error


def add_to(app: FastAPI) -> None:
    """Every error leaves in the one shape."""

    @app.exception_handler(APIError)
    async def _refused(request: Request, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        body = request.scope["route"].endpoint.__annotations__.get("body")
        return invalid(error.errors(), list(getattr(body, "model_fields", ()))).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        code = "not_found" if error.status_code == 404 else None
        return APIError(error.status_code, str(error.detail), None, code, error.headers).response()

    @app.exception_handler(Exception)
    async def _broken(request: Request, error: Exception) -> Response:
        return broken().response()


def broken() -> APIError:
    """A fault of ours: what it was is in the log only."""
    return APIError(500, "The server failed on this request; its log says why.", code="internal")


def invalid(errors: Sequence[Mapping[str, Any]], known: list[str]) -> APIError:
    """A refusal from the errors of pydantic: the first field at fault, in one sentence. known: the
    fields of the body.
    """
    first = errors[0]
    where = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return APIError(400, f"The body is not valid JSON: {first['ctx']['error']}.")
    if first["type"] == "too_many_fields":
        text = ".".join(map(str, where))
        return APIError(400, f"{first['msg']}.", text or None, "invalid_value")
    if not where:
        return APIError(400, "The body must be a JSON object, sent as application/json.")
    field = str(where[0])
    # An error inside a union is given once for each of its members.
    same = [e for e in errors if [p for p in e["loc"] if p != "body"][:1] == where[:1]]
    reasons = list(dict.fromkeys(str(e["msg"]) for e in same))
    if first["type"] == "extra_forbidden" and len(where) == 1:
        text = f"Unknown field {field!r}.{near(field, known)}"
        return APIError(400, text, field, "unknown_field")
    inner = ".".join(str(part) for part in where[1:]) if len(same) == 1 else ""
    path = f"{field}.{inner}" if inner else field
    code = "unknown_field" if first["type"] == "extra_forbidden" else "invalid_value"
    given = first.get("input")
    shown = isinstance(given, int | float | None) or (isinstance(given, str) and len(given) < 80)
    said = f"{path} is {given!r}" if shown and first["type"] != "missing" else f"{path} is wrong"
    return APIError(400, f"{said}: {'; or '.join(reasons)}.", path, code)
