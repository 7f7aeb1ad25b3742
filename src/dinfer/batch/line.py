"""One line of a batch and its result, in OpenAI's batch form."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dinfer.registry import near

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/infill")
FIELDS = ("custom_id", "method", "url", "body")
KEY_BYTES = 16
Result = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A request. number: its place in the input, from 1. error: why it cannot be one; the fields
    besides number and custom_id then mean nothing.
    """

    number: int
    custom_id: str | None
    url: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> bytes:
        """What tells this line from all others of the input."""
        return key_of(self.custom_id, self.number)


@dataclass(frozen=True)
class Reply:
    """What the server's application says to a call. body: JSON."""

    status: int
    request_id: str
    body: bytes


def key_of(custom_id: str | None, number: int) -> bytes:
    """KEY_BYTES that stand for a custom_id, or for the place of a line that has none."""
    name = f"line {number}" if custom_id is None else f"id {custom_id}"
    return hashlib.blake2b(name.encode(), digest_size=KEY_BYTES).digest()


def parse(number: int, text: bytes) -> Line:
    """A line of a JSONL file; what is wrong with it is its `error`."""
    try:
        given = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return Line(number, None, error=f"The line is not valid JSON: {error}.")
    if not isinstance(given, dict):
        return Line(number, None, error="The line is not a JSON object.")
    return check(number, given)


def check(number: int, given: Mapping[str, Any]) -> Line:
    """A line from its fields."""
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not _is_unicode(custom_id):
        error = f"custom_id is {_shown(custom_id)}; it must be a string of valid Unicode."
        return Line(number, None, error=error)
    return Line(number, custom_id, given.get("url", ""), given.get("body", {}), error=_fault(given))


def _is_unicode(text: str) -> bool:
    """JSON can hold one half of a surrogate pair; UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fault(given: Mapping[str, Any]) -> str | None:
    for name in given:
        if name not in FIELDS:
            return f"Unknown field {_shown(name)}.{near(name, list(FIELDS))}"
    if given.get("method", "POST") != "POST":
        return f"method is {_shown(given['method'])}; it must be 'POST'."
    url, body = given.get("url"), given.get("body")
    if url not in URLS:
        return f"url is {_shown(url)}; it must be one of {', '.join(URLS)}."
    if not isinstance(body, dict):
        return f"body is {_shown(body)}; it must be an object."
    if body.get("stream"):
        return "body.stream is true; a batch has no streams."
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def result(line: Line, reply: Reply) -> Result:
    """The line out for an answer, or for a refusal of the server's."""
    response = {
        "status_code": reply.status,
        "request_id": reply.request_id,
        "body": json.loads(reply.body),
    }
    return _result(line, response, None)


def failure(line: Line, code: str, message: str) -> Result:
    """The line out for a line that got no answer at all."""
    return _result(line, None, {"code": code, "message": message})


def _result(line: Line, response: Any, error: Any) -> Result:
    name = f"batch_req_{line.number}"
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": error}


def key_of_result(found: Mapping[str, Any]) -> bytes:
    """The key of the line that a result belongs to. Raises ValueError or KeyError where it is none
    of ours.
    """
    if not {"response", "error"} <= found.keys():
        raise KeyError("response")
    number = int(str(found["id"]).removeprefix("batch_req_"))
    custom_id = found["custom_id"]
    if not isinstance(custom_id, str | None):
        raise ValueError("custom_id")
    return key_of(custom_id, number)
