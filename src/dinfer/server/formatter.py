"""How an endpoint says what the engine gives: whole, and chunk by chunk."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from dinfer.engine.async_llm import AsyncLLM
from dinfer.request import CanvasEvent, Output, Request
from dinfer.server.schemas import CanvasBody, Common, StatsBody, UsageBody

Chunk = dict[str, Any]


@dataclass
class ResponseFormatter:
    """The requests of one call, a choice each, and the words for their events.

    Subclasses say what differs between endpoints: `kind`, the object of a chunk; `prefix` of ids;
    `opening`, `text`, `end` and `whole`.
    """

    model: str
    llm: AsyncLLM
    requests: list[Request]
    body: Common
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    kind: ClassVar[str]
    prefix: ClassVar[str]

    def __post_init__(self) -> None:
        self.id = self.prefix + secrets.token_hex(12)

    def opening(self) -> list[Chunk]:
        """Chunks before the first event."""
        return []

    def text(self, index: int, text: str) -> Chunk:
        """Settled text."""
        raise NotImplementedError

    def end(self, index: int, output: Output) -> Chunk:
        """The end of one choice."""
        raise NotImplementedError

    def whole(self, outputs: Sequence[Output]) -> BaseModel:
        """The answer of a call that does not stream."""
        raise NotImplementedError

    def usage(self, outputs: Sequence[Output]) -> UsageBody:
        """Each prompt once, all answers."""
        prompts = sum(o.usage.prompt_tokens for o in outputs[:: self.requests[0].params.n])
        return UsageBody.of(prompts, sum(o.usage.completion_tokens for o in outputs))

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> Chunk:
        """A chunk with the fields that all have; usage is null but at the end."""
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        usage = {"usage": None} if self.body.wants_usage else {}
        return head | {"choices": choices} | usage | more

    def stats(self, index: int, output: Output) -> StatsBody:
        """The cost of one choice."""
        return StatsBody.of(output, self.requests[index].seed)

    def blank_canvas(self, index: int) -> Chunk:
        """Step 0: the length of the answer, and what is fixed in it."""
        request = self.requests[index]
        answer = request.canvas[request.answer : request.end]
        fixed = [(place, token) for place, token in enumerate(answer) if token is not None]
        event = CanvasEvent(
            request.id, 0, [p for p, _ in fixed], [t for _, t in fixed], [1.0] * len(fixed)
        )
        return self.canvas(index, event, len(answer))

    def canvas(self, index: int, event: CanvasEvent, length: int | None = None) -> Chunk:
        """What a step set, in a chunk without choices, which every client passes over."""
        found = CanvasBody(
            index=index,
            step=event.step,
            positions=event.positions,
            token_ids=event.token_ids,
            tokens=[self.word(token) for token in event.token_ids],
            confidence=event.confidence,
            length=length,
        )
        return self.chunk([], canvas=found.model_dump())

    def word(self, token: int) -> str:
        """Text of one token; U+FFFD for a part of a character, nothing for a mask (taken back)."""
        loaded = self.llm.loaded
        if loaded.tokenizer is None or token == loaded.facts.mask_id:
            return ""
        return loaded.tokenizer.decode([token], skip_special=False)
