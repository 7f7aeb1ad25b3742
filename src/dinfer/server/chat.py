"""/v1/chat/completions: conversations, through the model's own template."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request

from dinfer.engine.async_llm import AsyncLLM
from dinfer.request import Output
from dinfer.server.api_error import APIError, naming
from dinfer.server.app_state import AppState
from dinfer.server.default_length import answer_length
from dinfer.server.formatter import Chunk, ResponseFormatter
from dinfer.server.schemas import (
    MOST_ITEMS,
    MOST_TOOLS,
    Answering,
    Finish,
    StatsBody,
    Strict,
    UsageBody,
)
from dinfer.server.streaming_reply import STREAMED, StreamingReply
from dinfer.step import NUM_TOP

Many = Field(max_length=MOST_ITEMS, fail_fast=True)
Tools = Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS, fail_fast=True)]


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A turn. What a template does with name and tool fields is the model's affair. The fields at
    the end are those of an answer that is sent back as it came.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Many] | None = None
    name: str | None = None
    tool_calls: Tools | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, Any]:
        """As templates expect it: the content is one string; fields without a value are absent."""
        parts = [self.content] if isinstance(self.content, str) else self.content or []
        text = "".join(part if isinstance(part, str) else part.text for part in parts)
        return {"role": self.role, "content": text, **self.extras()}

    def extras(self) -> dict[str, Any]:
        """The fields besides role and content that have a value."""
        return self.model_dump(exclude={"role", "content", "annotations"}, exclude_none=True)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]


class ResponseFormat(Strict):
    """Text is the only form so far."""

    type: Literal["text"]


class ChatBody(Answering):
    """A call. tools go to the model's template; the answer is text in any case. Fields at the end
    are of no consequence here, or can have one value only.
    """

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=NUM_TOP)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: (
        Annotated[list[Literal["text"]], Field(min_length=1, max_length=1, fail_fast=True)] | None
    ) = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class Top(BaseModel):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Top):
    """A token of the answer."""

    top_logprobs: list[Top]


class ChatLogprobs(BaseModel):
    """Of the answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class Answer(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """An answer; `token_ids` and `stats` are additions to the protocol."""

    index: int
    message: Answer
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int]
    stats: StatsBody


class ChatCompletion(BaseModel):
    """The whole answer of a call."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class ChatFormatter(ResponseFormatter):
    """Words of /v1/chat/completions."""

    kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def opening(self) -> list[Chunk]:
        """Who speaks."""
        role = {"role": "assistant", "content": ""}
        return [self.chunk([_delta(index, role)]) for index in range(len(self.requests))]

    def text(self, index: int, text: str) -> Chunk:
        """Settled text."""
        return self.chunk([_delta(index, {"content": text})])

    def end(self, index: int, output: Output) -> Chunk:
        """The log probabilities of all tokens come with the end."""
        choice = self._choice(index, output).model_dump(exclude={"message"})
        return self.chunk([choice | {"delta": {}}])

    def whole(self, outputs: Sequence[Output]) -> ChatCompletion:
        """All choices."""
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=[self._choice(index, output) for index, output in enumerate(outputs)],
            usage=self.usage(outputs),
        )

    def _choice(self, index: int, output: Output) -> ChatChoice:
        assert output.finish_reason != "abort"
        return ChatChoice(
            index=index,
            message=Answer(content=output.text),
            logprobs=self._logprobs(output),
            finish_reason=output.finish_reason,
            token_ids=output.token_ids,
            stats=self.stats(index, output),
        )

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        likely = output.top_logprobs or [[]] * len(output.token_ids)
        found = []
        own = zip(output.token_ids, output.logprobs, strict=True)
        for one, others in zip(own, likely, strict=True):
            top = [self._top(*pair) for pair in others]
            found.append(TokenLogprob(**vars(self._top(*one)), top_logprobs=top))
        return ChatLogprobs(content=found)

    def _top(self, token: int, logprob: float) -> Top:
        word = self.word(token)
        return Top(token=word, logprob=logprob, bytes=list(word.encode()))


def _delta(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def prepare(site: AppState, body: ChatBody) -> ChatFormatter:
    """The requests of a call. Raises Refusal."""
    name, llm = site.find(body.model)
    site.check_count(llm, body.n or 1)
    if body.top_logprobs and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true.", "top_logprobs", "invalid_value")
    ids = render(llm, body.messages, body.tools)
    length = _length(body) or answer_length(llm, len(ids))
    params = body.sampling(max_tokens=length, logprobs=bool(body.logprobs))
    longest = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with naming("messages", longest):
        requests = llm.prompts.complete(ids, params)
    site.check(llm, requests[0], "messages", longest)
    return ChatFormatter(name, llm, requests, body)


def render(
    llm: AsyncLLM, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> list[int]:
    """Token ids of a conversation. Raises Refusal."""
    with naming("messages"):
        tokenizer = llm.prompts.tokenizer
        # Templates put these in as they are, unlike the contents.
        for field, given in [("tools", tools), *(("messages", m.extras()) for m in messages)]:
            if given and tokenizer.touches_added(json.dumps(given, ensure_ascii=False)):
                raise APIError(400, f"{field} holds text of a special token.", field)
        return llm.prompts.chat([m.plain() for m in messages], tools=tools or None)


def _length(body: ChatBody) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        text = "max_tokens and max_completion_tokens differ; give one of them."
        raise APIError(400, text, "max_tokens", "invalid_value")
    return body.max_completion_tokens or body.max_tokens


def add_to(app: FastAPI, site: AppState) -> None:
    """Registers the endpoint."""

    @app.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED, tags=["OpenAI"]
    )
    async def chat_completions(body: ChatBody, request: Request) -> StreamingReply:
        """Answers a conversation."""
        return StreamingReply(site, await site.prepare(prepare, body, request.scope))
