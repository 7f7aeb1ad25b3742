"""The short way through a step: requests that want only the likeliest token of each row, and whose
decoder decides by a rule, on the native kernels.

It gives what `Runner.forward` and `sample_and_commit` give, but goes from plans to commits in one
pass over the batch and makes no tensors: for one request of a small model they cost as much time as
the kernels.
"""

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from dinfer.attention.metadata import AttentionMetadata
from dinfer.attention.sdpa import Segment
from dinfer.engine.sequence import SequenceState
from dinfer.errors import EngineError
from dinfer.kernel.greedy import greedy_search
from dinfer.native.products import Search, is_wide
from dinfer.runner.model_runner import Runner
from dinfer.runner.native_cpu import NativeRunner, segment_table
from dinfer.runner.sampler import SampledStep

Ids = npt.NDArray[np.int64]
_NONE: Ids = np.empty(0, np.int64)


class _Buffer:
    """Memory that is kept from step to step, at a known address."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.array = np.empty(0, dtype)
        self.address = 0

    def hold(self, count: int) -> None:
        """Makes room for so many numbers."""
        if len(self.array) < count:
            self.array = np.empty(2 * count, self.array.dtype)
            self.address = self.array.ctypes.data


class GreedyStep:
    """Runs body and head of a model on the kernels, for batches that `accepts` takes."""

    def __init__(
        self, native: NativeRunner, search: Search, sight: AttentionMetadata, mask_id: int | None
    ) -> None:
        self._native, self._search, self._sight, self._mask_id = native, search, sight, mask_id
        weight = native.model.embedding.weight
        self._hidden_size, self._wide = weight.shape[1], bool(is_wide(weight))
        self._plan, self._tokens = _Buffer(np.int64), _Buffer(np.int64)
        self._hidden, self._probs = _Buffer(np.float32), _Buffer(np.float32)

    @classmethod
    def of(cls, runner: Runner, mask_id: int | None) -> "GreedyStep | None":
        """For a runner that has what it takes, else None."""
        search = greedy_search(runner.model.head)
        if runner.dense is None or runner.sight.causal or not isinstance(search, Search):
            return None
        return (
            None if runner.model.conditioned else cls(runner.dense, search, runner.sight, mask_id)
        )

    def accepts(self, batch: Many[SequenceState]) -> bool:
        """Whether all sequences want only what a rule makes of the likeliest tokens."""
        return all(s.by_rule and s.window is not None and not s.window.parts for s in batch)

    def run(self, batch: Many[SequenceState]) -> list[SampledStep | Exception]:
        """What each sequence of the batch commits, in its order, or why it cannot."""
        asked = self._compute(batch)
        count = sum(map(len, asked))
        # Probabilities, so the sum is finite where all of them are.
        finite = bool(np.isfinite(self._probs.array[:count].sum()))
        done: list[SampledStep | Exception] = []
        start = 0
        for sequence, positions in zip(batch, asked, strict=True):
            stop = start + len(positions)
            tokens, probs = self._tokens.array[start:stop], self._probs.array[start:stop]
            if finite or np.isfinite(probs).all():
                done.append(_commit(sequence, positions, tokens, probs))
            else:
                done.append(EngineError("The model's logits are not finite (NaN or infinite)."))
            start = stop
        return done

    def _compute(self, batch: Many[SequenceState]) -> list[Ids]:
        """Fills the buffers with the tokens and probabilities of the positions that it gives."""
        tokens, positions, slots, index, asked = [], [], [], [], []
        segments: list[Segment] = []
        start = 0
        for sequence in batch:
            plan, canvas, table = sequence.plan, sequence.canvas, sequence.places[0]
            assert plan is not None
            rows, where, own = plan.index, plan.positions, sequence.asked
            tokens.append(canvas.tokens[rows])
            positions.append(where)
            slots.append(table.slots[rows])
            segments += self._sight.spans(sequence, table, where, start)
            asked.append(own)
            index.append(plan.find(own) + start)
            start += len(where)
            canvas.stale[rows] = False
        listed = segment_table(segments)
        parts = (*tokens, *positions, *slots, *listed, *index)
        count = sum(map(len, asked))
        total = 3 * start + sum(map(len, listed)) + count
        for buffer, size in (
            (self._plan, total), (self._hidden, start * self._hidden_size),
            (self._tokens, count), (self._probs, count),
        ):  # fmt: skip
            buffer.hold(size)
        np.concatenate(parts, out=self._plan.array[:total])
        plan_at, hidden_at = self._plan.address, self._hidden.address
        longest = max(len(sequence.canvas) for sequence in batch)
        self._native.run_plan(plan_at, start, len(segments), longest, hidden_at)
        self._search.run(
            hidden_at,
            plan_at + 8 * (total - count),
            (count, self._hidden_size),
            self._mask_id,
            self._wide,
            (self._tokens.address, self._probs.address),
        )
        return asked


def _commit(
    sequence: SequenceState, positions: Ids, tokens: Ids, probs: npt.NDArray[np.float32]
) -> SampledStep | Exception:
    """What the rule commits. What it raises ends this request alone."""
    try:
        if not len(positions):
            return SampledStep(_NONE, _NONE, probs, _NONE, False, _NONE, _NONE)
        chosen = sequence.strategy.decoder.rule(positions, probs)  # type: ignore[attr-defined]
        own = positions[chosen], tokens[chosen], probs[chosen]
    except Exception as error:
        return error
    return SampledStep(*own, _NONE, False, _NONE, _NONE)
