"""/v1/infill: text with holes, or tokens pinned to places of a canvas."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request as HTTPRequest

from dinfer.engine.async_llm import AsyncLLM
from dinfer.request import Output, Request
from dinfer.server.api_error import APIError, naming
from dinfer.server.app_state import AppState
from dinfer.server.formatter import Chunk, ResponseFormatter
from dinfer.server.schemas import MOST_ITEMS, Common, Finish, StatsBody, Strict, TokenIds, UsageBody
from dinfer.server.streaming_reply import STREAMED, StreamingReply

Span = tuple[int, int]
"""First position of a hole, counted from the answer's start, and its length."""
Layout = tuple[Request, list[Span], list[str] | None]
"""A request, its holes, and the fixed text around them where it was given as text."""


class Pin(Strict):
    """Text or token ids that stand from a position on."""

    position: Annotated[int, Field(ge=0, le=2**31 - 1)]
    content: str | TokenIds


class InfillBody(Common):
    """A call: either `text` with holes (`[BLANK:n]`, n tokens each), or `max_tokens` positions with
    `pinned` ones. prompt: what comes before, as in a completion.
    """

    text: str | None = None
    pinned: (
        Annotated[list[Pin], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)] | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    prompt: str | TokenIds | None = None


class Hole(BaseModel):
    """What was put into a hole. position: counted in tokens from the start of the filled text.
    confidence: of each token; mean_confidence: their geometric mean.
    """

    text: str
    position: int
    token_ids: list[int]
    confidence: list[float]
    mean_confidence: float


class InfillChoice(BaseModel):
    """A filled text and its holes."""

    index: int
    text: str
    holes: list[Hole]
    finish_reason: Finish
    stats: StatsBody


class Infill(BaseModel):
    """The whole answer of a call."""

    id: str
    object: Literal["infill"]
    created: int
    model: str
    choices: list[InfillChoice]
    usage: UsageBody


@dataclass
class InfillFormatter(ResponseFormatter):
    """Words of /v1/infill. pieces: the fixed text around the holes, None for a pinned canvas."""

    spans: Sequence[Span] = ()
    pieces: Sequence[str] | None = None
    kind = "infill.chunk"
    prefix = "infill-"

    def text(self, index: int, text: str) -> Chunk:
        """Settled text, fixed pieces included."""
        return self.chunk([{"index": index, "text": text, "holes": None, "finish_reason": None}])

    def end(self, index: int, output: Output) -> Chunk:
        """The holes come with the end."""
        return self.chunk([self._choice(index, output).model_dump() | {"text": ""}])

    def whole(self, outputs: Sequence[Output]) -> Infill:
        """All choices."""
        return Infill(
            id=self.id,
            object="infill",
            created=self.created,
            model=self.model,
            choices=[self._choice(index, output) for index, output in enumerate(outputs)],
            usage=self.usage(outputs),
        )

    def usage(self, outputs: Sequence[Output]) -> UsageBody:
        """What was given counts as prompt, what was found as answer."""
        blanks = sum(size for _, size in self.spans)
        return UsageBody.of(len(self.requests[0].canvas) - blanks, blanks * len(outputs))

    def stats(self, index: int, output: Output) -> StatsBody:
        """The cost of one choice; tokens are those of the holes."""
        blanks = sum(size for _, size in self.spans)
        per_forward = blanks / max(1, output.stats.forward_passes)
        return super().stats(index, output).model_copy(update={"tokens_per_forward": per_forward})

    def _choice(self, index: int, output: Output) -> InfillChoice:
        holes = [self._hole(output, span) for span in self.spans]
        text = output.text
        if self.pieces is not None:  # as given, whatever decoding its tokens would make of it
            texts = [hole.text for hole in holes]
            pairs = zip(self.pieces, [*texts, ""], strict=True)
            text = "".join(piece + hole for piece, hole in pairs)
        return InfillChoice(
            index=index,
            text=text,
            holes=holes,
            finish_reason="length",
            stats=self.stats(index, output),
        )

    def _hole(self, output: Output, span: Span) -> Hole:
        start, size = span
        ids = output.token_ids[start : start + size]
        assert output.logprobs is not None
        logs = output.logprobs[start : start + size]
        return Hole(
            text=self.llm.prompts.tokenizer.decode(ids),
            position=start,
            token_ids=ids,
            confidence=[math.exp(value) for value in logs],
            mean_confidence=math.exp(sum(logs) / len(logs)),
        )


def prepare(site: AppState, body: InfillBody) -> InfillFormatter:
    """The requests of a call. Raises Refusal."""
    name, llm = site.find(body.model)
    site.check_count(llm, body.n or 1)
    if (body.text is None) == (body.pinned is None):
        raise APIError(400, "Give either text with holes or pinned.", "text", "invalid_value")
    request, spans, pieces = (_from_pins if body.text is None else _from_text)(llm, body)
    site.check(llm, request, *(("text",) if body.pinned is None else ("pinned", "max_tokens")))
    return InfillFormatter(name, llm, llm.prompts.copies(request), body, spans=spans, pieces=pieces)


def _from_text(llm: AsyncLLM, body: InfillBody) -> Layout:
    assert body.text is not None
    if body.max_tokens is not None:
        text = "max_tokens goes with pinned; a hole says its own size."
        raise APIError(400, text, "max_tokens", "invalid_value")
    params = body.sampling(max_tokens=1, logprobs=True)
    with naming("text"):
        holes = llm.prompts.holes(body.text)
        request = llm.prompts.infill(holes, params, body.prompt or "")
        spans, place = [], 0
        for piece, size in zip(holes.pieces, holes.sizes, strict=False):
            place += len(llm.prompts.tokenizer.encode(piece))
            spans.append((place, size))
            place += size
    return request, spans, holes.pieces


def _from_pins(llm: AsyncLLM, body: InfillBody) -> Layout:
    assert body.pinned is not None
    if body.max_tokens is None:
        text = "pinned needs max_tokens, the length of the canvas."
        raise APIError(400, text, "max_tokens", "invalid_value")
    starts = [pin.position for pin in body.pinned]
    if len(set(starts)) < len(starts):
        raise APIError(400, "Two pins have the same position.", "pinned", "invalid_value")
    params = body.sampling(logprobs=True)
    with naming("pinned", "max_tokens"):
        pins = {pin.position: pin.content for pin in body.pinned}
        request = llm.prompts.pinned(pins, params, body.prompt or "")
    answer = enumerate(request.canvas[request.answer :])
    groups = itertools.groupby(answer, key=lambda pair: pair[1] is None)
    runs = [[place for place, _ in group] for blank, group in groups if blank]
    return request, [(run[0], len(run)) for run in runs], None


def add_to(app: FastAPI, site: AppState) -> None:
    """Registers the endpoint."""

    @app.post("/v1/infill", response_model=Infill, responses=STREAMED, tags=["canvas"])
    async def infill(body: InfillBody, request: HTTPRequest) -> StreamingReply:
        """Fills the holes of a text, or a canvas around pinned tokens."""
        return StreamingReply(site, await site.prepare(prepare, body, request.scope))
