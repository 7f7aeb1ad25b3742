"""Around every call: who may call, the body and its limits, one line in the log."""

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dinfer.server.api_error import APIError
from dinfer.server.app_state import AppState

log = logging.getLogger("dinfer.server")
OPEN = ("/", "/health", "/ready", "/openapi.json")
"""Paths that need no key, besides the page's files."""
_SHOWN_METHOD = 20


class ClientLeft(Exception):
    """The client went away before its body was whole."""


class Access:
    """Middleware. The log has what a call was and cost, never what it said."""

    def __init__(self, app: ASGIApp, site: AppState) -> None:
        self._app, self._site = app, site
        self._keys = [_digest(key.encode()) for key in site.settings.keys]
        self._hosts = {host.lower().encode() for host in site.settings.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, call_id = time.perf_counter(), secrets.token_hex(8)
        head = scope["method"] == "HEAD"
        scope["dinfer.note"] = note = {"status": 500}
        if head:  # answered as GET is, without the body
            scope = {**scope, "method": "GET"}

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                note["status"] = message["status"]
                extra = (b"x-request-id", call_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), extra]}
            elif head:
                message = {**message, "body": b""}
            await send(message)

        try:
            key = self._admit(scope)
            scope["dinfer.salt"] = key
            body = await self._body(receive)
        except APIError as refusal:
            await refusal.response()(scope, receive, noting)
        except ClientLeft:
            note["status"] = 499
        else:
            scope["dinfer.size"] = len(body)
            await self._app(scope, _replayed(body, receive), noting)
        finally:
            self._record(scope, call_id, time.perf_counter() - began, note)

    def _record(self, scope: Scope, call_id: str, seconds: float, note: dict[str, int]) -> None:
        endpoint = getattr(scope.get("route"), "path", "other")
        self._site.metrics.calls.labels(endpoint, str(note["status"])).inc()
        method = scope["method"][:_SHOWN_METHOD]
        known = {"id": call_id, "method": method, "path": endpoint}
        log.info("call", extra={"fields": known | {"seconds": round(seconds, 4)} | note})

    def _admit(self, scope: Scope) -> str:
        """What tells this caller's key from others, empty without one. Raises APIError where the
        headers are reason enough to refuse the call.
        """
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self._check_host(headers.get(b"host", b""))
        caller = self._caller(scope["path"], headers.get(b"authorization", b""))
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding not in (b"identity", b""):
            shown = coding[:50].decode("latin-1")
            text = f"Content-Encoding is {shown!r}; only bodies that are not encoded are taken."
            raise APIError(415, text, None, "unsupported_encoding")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._site.settings.max_body:
            raise self._too_large()
        return caller

    def _check_host(self, host: bytes) -> None:
        """Refuses names that are not this server's. A page whose own name is made to lead here
        (DNS rebinding) is of the same origin for a browser, so nothing else keeps it out.
        """
        name, _, port = host.lower().rpartition(b":")
        if not port.isdigit():
            name = host.lower()
        if self._hosts and name not in self._hosts:
            shown = host[:100].decode("latin-1")
            allowed = ", ".join(sorted(map(bytes.decode, self._hosts)))
            text = f"The host {shown!r} is not served here. Allowed: {allowed}."
            raise APIError(403, text, None, "unknown_host")

    def _caller(self, path: str, given: bytes) -> str:
        if not self._keys or path in OPEN or path.startswith("/page/"):
            return ""
        kind, _, key = given.partition(b" ")
        key = key.strip()
        if kind.lower() != b"bearer" or not _known(key, self._keys):
            raise APIError(
                401,
                "This server needs an API key: Authorization: Bearer KEY.",
                None,
                "invalid_api_key",
                {"WWW-Authenticate": "Bearer"},
            )
        return _digest(key).hex()

    async def _body(self, receive: Receive) -> bytes:
        """The whole body. Raises APIError where it is too large or too slow, ClientLeft where the
        client is gone.
        """
        chunks, size, more = [], 0, True
        with self._site.gate.receiving(self._site.settings.receive_timeout):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunks.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(chunks[-1])
                if size > self._site.settings.max_body:
                    raise self._too_large()
        return b"".join(chunks)

    def _too_large(self) -> APIError:
        text = f"The body is larger than {self._site.settings.max_body} bytes."
        return APIError(413, text, None, "body_too_large")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` for a body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _known(key: bytes, keys: Sequence[bytes]) -> bool:
    """Whether the key is one of those; takes as long for any key."""
    digest = _digest(key)
    return sum(hmac.compare_digest(digest, known) for known in keys) > 0
