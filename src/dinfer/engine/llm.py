"""`LLM`: the engine for offline use, in the caller's own thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dinfer.attention.sdpa import Segment, attention, grouped
from dinfer.engine.base_llm import BaseLLM
from dinfer.engine.engine import Event
from dinfer.engine.inbox import Inboxes
from dinfer.engine.input_processor import Holes, Prompt
from dinfer.errors import RequestError
from dinfer.loader.load import Loaded
from dinfer.request import Output, Request, SamplingParams, TextEvent


class LLM(BaseLLM):
    """A diffusion language model that answers prompts; takes the arguments of `BaseLLM`.

    Calls may be nested, interleaved (two streams read in turns) and made from several threads: they
    share the steps of one engine, and each gets its own events.
    """

    def __init__(self, model: str | Loaded, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._inboxes = Inboxes(self.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        suffix: Prompt | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_output: Callable[[Output], None] | None = None,
    ) -> list[Output]:
        """Answers to one prompt or many (text or token ids), in order; `params.n` outputs for each.

        suffix: fixed text after the answer, which then has exactly max_tokens tokens. on_event
        sees every event; on_output each output as soon as it is done, which costs less.
        """
        many = _many(prompts)
        each = self._params(params, len(many))
        requests = [self.prompts.complete(p, s, suffix) for p, s in zip(many, each, strict=True)]
        return self._run([request for group in requests for request in group], on_event, on_output)

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        params: SamplingParams | None = None,
        on_event: Callable[[Event], None] | None = None,
        **variables: Any,
    ) -> list[Output]:
        """Answers to a conversation, `params.n` of them; `variables` go to the model's chat
        template.
        """
        return self.generate([self.prompts.chat(messages, **variables)], params, on_event=on_event)

    def infill(
        self,
        text: str,
        params: SamplingParams | None = None,
        prompt: Prompt = "",
        on_event: Callable[[Event], None] | None = None,
    ) -> Output:
        """Fills the `[BLANK:n]` holes of a text (n tokens each); `text` of the output is the
        whole, `holes` what was put in. prompt: what comes before the text, as in generate."""
        holes = self.prompts.holes(text)
        request = self.prompts.infill(holes, params or SamplingParams(), prompt)
        (output,) = self._run([request], on_event)
        return self._filled(output, holes, request)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Events of one request as they come: CanvasEvent (provisional) and TextEvent (settled,
        the last has `output`).
        """
        (request,) = self.prompts.complete(prompt, replace(params or SamplingParams(), n=1))
        with self._inboxes.serve([request]) as events:
            yield from events

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Raw logits [T, V] of one uncached pass over `token_ids` with the family's attention; a
        causal model takes them as one open canvas without a prompt.
        """
        model = self.loaded.model
        block = None if self.facts.causal else self.facts.block_length
        ids = torch.tensor(list(token_ids), dtype=torch.int64, device=model.embedding.weight.device)
        length = len(ids)
        if not length:
            return model.embedding.weight.new_empty(0, model.shape.vocab)
        edges = [*range(0, length, block or max(1, length)), length]
        spans = [Segment(low, high, slice(0, high)) for low, high in itertools.pairwise(edges)]
        groups = grouped(spans, ids.device)
        # Not inference_mode: callers may want to change the logits in place.
        with torch.no_grad():
            x = model.embed(ids)
            rows = model(
                model.condition(x, torch.zeros_like(x)) if model.conditioned else x,
                torch.arange(length, device=ids.device),
                lambda layer, q, k, v: attention(q, k, v, groups),
            )
            out: Tensor = model.head(rows)
        return out

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise RequestError(
                f"{len(params)} SamplingParams were given for {count} prompts;"
                " give one, or one each."
            )
        return list(params)

    def _run(
        self,
        requests: list[Request],
        on_event: Callable[[Event], None] | None,
        on_output: Callable[[Output], None] | None = None,
    ) -> list[Output]:
        """Serves requests to their end. A request that is refused or fails takes the others of the
        call back out.
        """
        requests = [replace(request, quiet=on_event is None) for request in requests]
        outputs: dict[str, Output] = {}
        with self._inboxes.serve(requests) as events:
            for event in events:
                if on_event is not None:
                    on_event(event)
                if isinstance(event, TextEvent) and event.output is not None:
                    outputs[event.id] = event.output
                    if on_output is not None:
                        on_output(event.output)
        return [outputs[request.id] for request in requests]

    def _filled(self, output: Output, holes: Holes, request: Request) -> Output:
        tokenizer, ids = self.prompts.tokenizer, iter(output.token_ids)
        blanks = [token is None for token in request.canvas[request.answer :]]
        chosen = [t for t, blank in zip(ids, blanks, strict=True) if blank]
        texts, start = [], 0
        for size in holes.sizes:
            texts.append(tokenizer.decode(chosen[start : start + size]))
            start += size
        whole = holes.pieces[0] + "".join(
            t + p for t, p in zip(texts, holes.pieces[1:], strict=True)
        )
        return replace(output, text=whole, holes=texts)


def _many(prompts: Any) -> list[Prompt]:
    """One prompt (a string, or a list of ids) as a list of one; an empty list holds no prompt."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)
