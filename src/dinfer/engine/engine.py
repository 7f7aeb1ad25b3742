"""The engine: takes requests, runs steps, gives events. One thread calls it; the fronts are in
llm.py and serve.py.
"""

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from dinfer.attention.metadata import AttentionMetadata
from dinfer.canvas import Canvas
from dinfer.engine import validate
from dinfer.engine.output_processor import OutputProcessor
from dinfer.engine.scheduler import Scheduler
from dinfer.engine.sequence import SequenceState, Strategy
from dinfer.errors import ContextLengthError, EngineError, RequestError
from dinfer.kernel.noise import random_tokens
from dinfer.kv.pool import KVCachePool
from dinfer.kv.prefix_cache import PrefixCache
from dinfer.nn.transformer import Transformer
from dinfer.registry import build
from dinfer.request import (
    CanvasEvent,
    FailureEvent,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    TextEvent,
    Usage,
    repetition,
)
from dinfer.runner.greedy import GreedyStep
from dinfer.runner.model_runner import Runner
from dinfer.runner.sampler import SampledStep, sample_and_commit
from dinfer.runner.threads import ThreadGovernor
from dinfer.step import NUM_TOP, PAGE, ModelInfo
from dinfer.text.tokenizer import Tokenizer

log = logging.getLogger("dinfer")
Event = CanvasEvent | TextEvent
EngineEvent = Event | FailureEvent
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Limits:
    """Most sequences at once, most rows in a step, pages of the pool; `poison` fills new pages
    with NaN (tests).
    """

    sequences: int = 64
    rows: int = 8192
    pages: int = 256
    poison: bool = False


class Engine:
    """A loaded model with its pool, scheduler and runner."""

    def __init__(
        self,
        model: Transformer,
        facts: ModelInfo,
        tokenizer: Tokenizer | None,
        limits: Limits,
        compiled: bool | None = None,
    ) -> None:
        self.model, self.facts, self.tokenizer = model, facts, tokenizer
        weight = model.embedding.weight
        # Rows of causal text are final each by itself.
        unit = 1 if facts.causal else facts.block_length
        prefix_cache = None if unit is None else PrefixCache(unit)
        self.pool = KVCachePool(
            model.shape, limits.pages, weight.dtype, weight.device, limits.poison, prefix_cache
        )
        self.scheduler = Scheduler(self.pool, limits.sequences, limits.rows)
        sight = AttentionMetadata(facts.block_length, facts.causal)
        self.runner = Runner(model, self.pool, sight, compiled)
        self.greedy = GreedyStep.of(self.runner, facts.mask_id)
        self._threads = ThreadGovernor() if weight.device.type == "cpu" else None
        self._live: dict[str, tuple[SequenceState, OutputProcessor]] = {}

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._live)

    @property
    def load(self) -> int:
        """Requests that are waiting or running."""
        return len(self._live)

    def strategy(self, params: SamplingParams) -> Strategy:
        """The strategies of a request. Raises UnknownName or RequestError."""
        strategy = Strategy(
            build("iteration", params.iteration or self.facts.iteration),
            build("cache", params.cache or self.facts.cache),
            build("decoder", params.decoder or self.facts.decoder),
        )
        validate.check(strategy, params, self.facts)
        return strategy

    def add(self, request: Request) -> None:
        """Takes a request. Raises RequestError, and changes nothing, if it can never be served."""
        if request.id in self._live:
            raise RequestError(f"A request with the id {request.id!r} is already being served.")
        strategy = self.check(request)
        sequence = SequenceState(request, self._canvas(request), strategy, self.facts.shift)
        self._live[request.id] = (sequence, OutputProcessor(self.tokenizer, request.params.stop))
        self.scheduler.add(sequence)

    def check(self, request: Request) -> Strategy:
        """The strategies of a request. Raises RequestError or UnknownName if it can never be
        served; changes nothing, so any thread may ask.
        """
        self._check(request)
        pages = -(-self._length(request) // PAGE) * request.runs
        if pages > self.pool.pages:
            raise RequestError(
                f"The request needs {pages} pages of {PAGE} positions"
                f" and the K/V pool has {self.pool.pages};"
                " ask for fewer tokens or give the pool more memory."
            )
        return self.strategy(request.params)

    def abort(self, request_id: str) -> list[EngineEvent]:
        """Ends a request at once, frees its pages, and gives its last event; an unknown id gives
        none.
        """
        if request_id not in self._live:
            return []
        sequence, answer = self._live[request_id]
        untold = sequence.canvas.tokens[sequence.told : sequence.settled].tolist()
        try:
            text = answer.feed(untold)
        except Exception as error:
            sequence.error = error
            return [self._fail(sequence)]
        return [self._finish(sequence, answer, "abort", text)]

    def step(self) -> list[EngineEvent]:
        """One forward for every sequence that is scheduled, and the events of what came of it. An
        error in a strategy, a tokenizer or a row ends the request concerned with a FailureEvent.
        """
        batch = self.scheduler.pick()
        done = [s for s in self.scheduler.running if s.plan is None and s.error is None]
        events: list[EngineEvent] = []
        for sequence, sampled in zip(batch, self._run(batch), strict=True):
            if isinstance(sampled, Exception):
                sequence.error = sampled
            else:
                events += self._guarded(sequence, partial(self._write, sampled))
        for sequence in done:
            events += self._guarded(sequence, self._settle)
        for sequence in [s for s in self.scheduler.running if s.error is not None]:
            events.append(self._fail(sequence))
        return events

    def _run(self, batch: Sequence[SequenceState]) -> list[SampledStep | Exception]:
        """What each sequence commits. Where a step fails as a whole, each runs by itself."""
        if not batch:
            return []
        if self._threads is not None:
            self._threads.adjust()
        try:
            if self.greedy is not None and self.greedy.accepts(batch):
                return self.greedy.run(batch)
            with torch.inference_mode():
                hidden = self.runner.forward(batch)
                return sample_and_commit(batch, hidden, self.model, self.facts.mask_id)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            log.warning("a step of %d requests failed; each is tried alone: %s", len(batch), error)
            return [result for sequence in batch for result in self._run([sequence])]

    def _guarded(
        self, sequence: SequenceState, work: Callable[[SequenceState], list[Event]]
    ) -> list[Event]:
        """The events of `work`; an error is noted for the sequence."""
        try:
            return work(sequence)
        except Exception as error:
            sequence.error = error
            return []

    def _fail(self, sequence: SequenceState) -> FailureEvent:
        error, request = sequence.error, sequence.request
        if error is None:
            raise RuntimeError("only a sequence with an error fails")
        trace = None if isinstance(error, EngineError) else error
        log.error("request %s failed: %s", request.id, error, exc_info=trace)
        self.scheduler.remove(sequence)
        del self._live[request.id]
        return FailureEvent(request.id, error)

    def _check(self, request: Request) -> None:
        vocab, context = self.model.shape.vocab, self.facts.context
        wrong = next((t for t in request.canvas if t is not None and not 0 <= t < vocab), None)
        if wrong is not None:
            raise RequestError(
                f"Token id {wrong} is out of range; this model's ids go from 0 to {vocab - 1}."
            )
        if request.params.top_logprobs > NUM_TOP:
            raise RequestError(
                f"top_logprobs is {request.params.top_logprobs}; it must be at most {NUM_TOP}."
            )
        if len(request.canvas) > context:
            fixed = sum(token is not None for token in request.canvas)
            raise ContextLengthError.of(fixed, len(request.canvas) - fixed, context)

    def _canvas(self, request: Request) -> Canvas:
        """Models with blocks see whole ones, so their canvas ends with one (as far as the context
        goes). Without a mask token it starts as noise.
        """
        facts = self.facts
        tokens = [*request.canvas, *[None] * (self._length(request) - len(request.canvas))]
        limit = len(request.canvas) if request.end is None else request.end
        base = request.answer if facts.causal else 0
        canvas = Canvas(tokens, request.answer, limit, facts.mask_id, facts.block_length, base)
        if request.stops and not request.params.ignore_eos:
            canvas.ends = facts.eos_ids
        if facts.mask_id is None:
            blanks = np.flatnonzero(canvas.masked)
            seeds = torch.full((len(blanks),), request.seed)
            where, step = torch.from_numpy(blanks), torch.zeros(len(blanks), dtype=torch.int64)
            noise = random_tokens(seeds, where, step, self.model.shape.vocab)
            canvas.draft(blanks, noise.numpy())
        return canvas

    def _length(self, request: Request) -> int:
        length, block = len(request.canvas), self.facts.block_length
        if block is None:
            return length
        base = request.answer if self.facts.causal else 0
        whole = base - (base - length) // block * block
        return min(whole, max(self.facts.context, length))

    def _write(self, commit: SampledStep, sequence: SequenceState) -> list[Event]:
        canvas = sequence.canvas
        if sequence.stats.forward_passes >= sequence.max_steps:
            commit = replace(commit, back=_NONE, open=False)
        self._check_progress(sequence, commit)
        if len(commit.drafted):
            canvas.draft(commit.drafted, commit.draft)
        commit = commit.before(canvas.limit)
        canvas.write(commit.positions, commit.tokens)
        if len(commit.back):
            canvas.take_back(commit.back)
        sequence.held_open = commit.open
        sequence.chances.note(commit.positions, commit.confidence, commit.likely)
        for state in sequence.states:
            state.steps += 1
        sequence.stats.forward_passes += 1
        sequence.stats.rows_run += sequence.rows + len(sequence.shadow)
        sequence.plan, sequence.final = None, sequence.cache_state.final
        self._end_early(sequence, commit)
        events = [] if sequence.request.quiet else [self._shown(sequence, commit)]
        return [*events, *self._grow(sequence), *self._settle(sequence)]

    def _check_progress(self, sequence: SequenceState, commit: SampledStep) -> None:
        """Raises EngineError where a sequence would go on for ever."""
        changed = len(commit.positions) + len(commit.drafted)
        steps, most = sequence.stats.forward_passes, 2 * sequence.max_steps
        decoder = type(sequence.strategy.decoder).__name__
        if not (changed or sequence.held_open or sequence.growth):
            raise EngineError(f"The decoder {decoder} committed nothing in a step.")
        if steps >= most:
            raise EngineError(f"The request did not end in {most} steps of the decoder {decoder}.")

    def _shown(self, sequence: SequenceState, commit: SampledStep) -> Event:
        first = sequence.canvas.answer
        return CanvasEvent(
            sequence.request.id,
            sequence.stats.forward_passes,
            (commit.positions - first).tolist(),
            commit.tokens.tolist(),
            commit.confidence.tolist(),
            (commit.back - first).tolist() if len(commit.back) else [],
        )

    def _grow(self, sequence: SequenceState) -> list[Event]:
        """Lets the canvas grow; tells what moved by that, in the words of any other step."""
        moved, left = sequence.grow()
        if not len(moved) or sequence.request.quiet:
            return []
        canvas = sequence.canvas
        return [
            CanvasEvent(
                sequence.request.id,
                sequence.stats.forward_passes,
                (moved - canvas.answer).tolist(),
                canvas.tokens[moved].tolist(),
                sequence.chances.probabilities(moved),
                (left - canvas.answer).tolist(),
            )
        ]

    def _end_early(self, sequence: SequenceState, commit: SampledStep) -> None:
        """Nothing after the first end-of-text of the answer needs a decision."""
        canvas = sequence.canvas
        if canvas.revisable:
            # An end-of-text may be gone again, so what counts is what stands now.
            canvas.limit = canvas.end
            places = np.flatnonzero(~canvas.masked & ~canvas.given)
            tokens = canvas.tokens[places]
        else:
            places, tokens = commit.positions, commit.tokens
        if canvas.ends.isdisjoint(found := tokens.tolist()):
            return
        first = next(p for p, t in zip(places.tolist(), found, strict=True) if t in canvas.ends)
        canvas.limit = min(canvas.limit, first + 1)

    def _settle(self, sequence: SequenceState) -> list[Event]:
        """Gives out what is settled now, and finishes the sequence when that is all."""
        canvas = sequence.canvas
        _, answer = self._live[sequence.request.id]
        first = canvas.first_masked()
        done = first is None and not sequence.held_open
        end = canvas.limit if first is None else first
        if canvas.revisable and not done:
            assert sequence.window is not None
            end = min(end, sequence.window.start)
        end = max(end, sequence.settled)
        unheard = sequence.request.quiet and not sequence.request.params.stop
        sequence.settled, before = end, sequence.settled
        if not done and (end == before or unheard):
            return []
        new = canvas.tokens[sequence.told : end].tolist()
        sequence.told = end
        stopped = self._stopped(sequence, new)
        text = answer.feed(new[:-1] if stopped else new, last=done)
        if answer.stopped or done:
            reason: FinishReason = "stop" if stopped or answer.stopped else "length"
            return [self._finish(sequence, answer, reason, text)]
        return [TextEvent(sequence.request.id, text)] if text and not sequence.request.quiet else []

    def _stopped(self, sequence: SequenceState, new: list[int]) -> bool:
        canvas = sequence.canvas
        return bool(new) and new[-1] in canvas.ends and sequence.settled == canvas.limit

    def _finish(
        self, sequence: SequenceState, answer: OutputProcessor, reason: FinishReason, text: str
    ) -> TextEvent:
        request, canvas, stats = sequence.request, sequence.canvas, sequence.stats
        self.scheduler.remove(sequence)
        del self._live[request.id]
        sequence.finished = reason
        now = time.perf_counter()
        stats.seconds = now - sequence.admitted if sequence.admitted else 0.0
        stats.queued_seconds = (sequence.admitted or now) - sequence.arrived
        stats.tokens = max(0, sequence.settled - canvas.answer)
        ids = canvas.tokens[canvas.answer : sequence.settled].tolist()
        if self._stopped(sequence, ids):
            ids = ids[:-1]
        if answer.stopped:
            ids = self._before_stop(ids, answer.text)
        stats.repetition = repetition(ids)
        usage = Usage(canvas.answer, len(ids))
        probs = sequence.chances.of(slice(canvas.answer, canvas.answer + len(ids)))
        output = Output(request.id, answer.text, ids, reason, usage, stats, *probs)
        return TextEvent(request.id, answer.text if request.quiet else text, output)

    def _before_stop(self, ids: list[int], text: str) -> list[int]:
        """The fewest leading ids that spell `text`, which a stop string has cut: found by
        bisection, as more ids spell more text.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RuntimeError("stop strings need a tokenizer")
        return ids[
            : bisect.bisect_left(
                range(len(ids)), True, key=lambda n: tokenizer.decode(ids[:n]).startswith(text)
            )
        ]
