"""/v1/completions: plain text, infilling before a suffix, several prompts and answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request as HTTPRequest

from dinfer.engine.async_llm import AsyncLLM
from dinfer.request import Output, Request
from dinfer.server.api_error import APIError, naming
from dinfer.server.app_state import AppState
from dinfer.server.default_length import answer_length
from dinfer.server.formatter import Chunk, ResponseFormatter
from dinfer.server.schemas import (
    MOST_CHOICES,
    Answering,
    Finish,
    One,
    StatsBody,
    TokenIds,
    UsageBody,
)
from dinfer.server.streaming_reply import STREAMED, StreamingReply
from dinfer.step import NUM_TOP

Ids = Annotated[TokenIds, Field(min_length=1)]
Several = Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)


class CompletionBody(Answering):
    """A call. suffix: text after the answer, which the model sees and which is not given back.
    logprobs: 0 gives the log probability of each token; more also those of so many likeliest ones.
    """

    prompt: str | Ids | Annotated[list[str], Several] | Annotated[list[Ids], Several]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=NUM_TOP)] | None = None
    best_of: One | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or many prompts as many."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Logprobs(BaseModel):
    """Of the answer's tokens; text_offset counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """An answer; `token_ids` and `stats` are additions to the protocol."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Finish
    token_ids: list[int]
    stats: StatsBody


class Completion(BaseModel):
    """The whole answer of a call."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


@dataclass
class CompletionFormatter(ResponseFormatter):
    """Words of /v1/completions. echoes: text before the answer of each choice."""

    echoes: Sequence[str] = ()
    kind = "text_completion"
    prefix = "cmpl-"

    def opening(self) -> list[Chunk]:
        """The prompts, where they are asked for."""
        return [self.text(index, echo) for index, echo in enumerate(self.echoes) if echo]

    def text(self, index: int, text: str) -> Chunk:
        """Settled text."""
        return self.chunk([_delta(index, text, None, None)])

    def end(self, index: int, output: Output) -> Chunk:
        """The log probabilities of all tokens come with the end."""
        choice = self._choice(index, output).model_dump() | {"text": ""}
        return self.chunk([choice])

    def whole(self, outputs: Sequence[Output]) -> Completion:
        """All choices."""
        return Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=[self._choice(index, output) for index, output in enumerate(outputs)],
            usage=self.usage(outputs),
        )

    def _choice(self, index: int, output: Output) -> CompletionChoice:
        assert output.finish_reason != "abort"
        echo = self.echoes[index]
        return CompletionChoice(
            index=index,
            text=echo + output.text,
            logprobs=self._logprobs(output, len(echo)),
            finish_reason=output.finish_reason,
            token_ids=output.token_ids,
            stats=self.stats(index, output),
        )

    def _logprobs(self, output: Output, offset: int) -> Logprobs | None:
        if output.logprobs is None:
            return None
        words = [self.word(token) for token in output.token_ids]
        offsets = []
        for word in words:
            offsets.append(offset)
            offset += len(word)
        return Logprobs(
            tokens=words,
            token_logprobs=output.logprobs,
            top_logprobs=None if output.top_logprobs is None else self._top(output),
            text_offset=offsets,
        )

    def _top(self, output: Output) -> list[dict[str, float]]:
        """By their text, the token itself among them even where it is none of the likeliest; of
        tokens with the same text the likeliest.
        """
        found = []
        assert output.logprobs is not None and output.top_logprobs is not None
        own = zip(output.token_ids, output.logprobs, strict=True)
        for one, likely in zip(own, output.top_logprobs, strict=True):
            words: dict[str, float] = {}
            for token, value in (*likely, one):
                words.setdefault(self.word(token), value)
            found.append(words)
        return found


def _delta(index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def prepare(site: AppState, body: CompletionBody) -> CompletionFormatter:
    """The requests of a call. Raises Refusal."""
    name, llm = site.find(body.model)
    if body.logprobs is not None and body.echo:
        text = "echo with logprobs is not possible: a prompt has no probabilities in such a model."
        raise APIError(400, text, "echo", "invalid_value")
    prompts = body.prompts()
    site.check_count(llm, len(prompts) * (body.n or 1))
    requests: list[Request] = []
    echoes: list[str] = []
    for prompt in prompts:
        made = _requests(site, llm, body, prompt)
        requests += made
        echoes += [_echo(llm, prompt) if body.echo else ""] * len(made)
    return CompletionFormatter(name, llm, requests, body, echoes=echoes)


def _requests(
    site: AppState, llm: AsyncLLM, body: CompletionBody, prompt: str | list[int]
) -> list[Request]:
    with naming("prompt"):
        ids = llm.prompts.ids(prompt)
    with naming("suffix"):
        tail = llm.prompts.encode(body.suffix) if body.suffix else None
    length = body.max_tokens or answer_length(llm, len(ids) + len(tail or ()))
    top = body.logprobs
    params = body.sampling(max_tokens=length, logprobs=top is not None, top_logprobs=top or 0)
    with naming("stop" if params.stop and llm.loaded.tokenizer is None else "prompt", "max_tokens"):
        requests = llm.prompts.complete(ids, params, tail)
    requests = [replace(request, end=len(ids) + length) for request in requests]
    site.check(llm, requests[0], "prompt", "max_tokens")
    return requests


def _echo(llm: AsyncLLM, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    with naming("echo"):
        return llm.prompts.tokenizer.decode(prompt, skip_special=False)


def add_to(app: FastAPI, site: AppState) -> None:
    """Registers the endpoint."""

    @app.post("/v1/completions", response_model=Completion, responses=STREAMED, tags=["OpenAI"])
    async def completions(body: CompletionBody, request: HTTPRequest) -> StreamingReply:
        """Continues text, or fills in before a suffix."""
        return StreamingReply(site, await site.prepare(prepare, body, request.scope))
