"""Around every call: the key, the body's limit, one line in the log."""

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dinfer.server.api_error import APIError
from dinfer.server.app_state import AppState

log = logging.getLogger("dinfer.server")
OPEN = ("/", "/health", "/ready", "/openapi.json")
"""Paths that need no key, besides the page's files."""


class Access:
    """Middleware. The log has what a call was and cost, never what it said."""

    def __init__(self, app: ASGIApp, site: AppState) -> None:
        self._app, self._site = app, site
        self._keys = [_digest(key.encode()) for key in site.settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, call_id = time.perf_counter(), secrets.token_hex(8)
        note = scope["dinfer.note"] = {"status": 500}

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
                extra = (b"x-request-id", call_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), extra]}
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, noting)
            else:
                await self._app(scope, self._limited(receive), noting)
        finally:
            self._record(scope, call_id, time.perf_counter() - began, note)

    def _record(self, scope: Scope, call_id: str, seconds: float, note: dict[str, object]) -> None:
        endpoint = getattr(scope.get("route"), "path", "other")
        self._site.metrics.calls.labels(endpoint, str(note["status"])).inc()
        known = {"id": call_id, "method": scope["method"], "path": endpoint}
        log.info("call", extra={"fields": known | {"seconds": round(seconds, 4)} | note})

    def _refusal(self, scope: Scope) -> APIError | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._keys and not self._may(scope["path"], headers.get(b"authorization", b"")):
            return APIError(
                401,
                "This server needs an API key: Authorization: Bearer KEY.",
                None,
                "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._site.settings.max_body:
            return APIError(413, self._too_large(), None, "body_too_large")
        return None

    def _may(self, path: str, given: bytes) -> bool:
        if path in OPEN or path.startswith("/page/"):
            return True
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and _known(key.strip(), self._keys)

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that refuses a body which grows too large (its length may not be told)."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._site.settings.max_body:
                raise HTTPException(413, self._too_large())
            return message

        return counted

    def _too_large(self) -> str:
        return f"The body is larger than {self._site.settings.max_body} bytes."


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _known(key: bytes, keys: Sequence[bytes]) -> bool:
    """Whether the key is one of those; takes as long for any key."""
    digest = _digest(key)
    return sum(hmac.compare_digest(digest, known) for known in keys) > 0
