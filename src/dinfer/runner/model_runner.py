"""Runs plans: one ragged forward for all rows of all sequences. Names no strategy.

T rows, D hidden, H heads, K key/value heads, d head size.
"""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.attention.backend import StoredKV
from dinfer.attention.metadata import AttentionMetadata
from dinfer.attention.sdpa import Segment
from dinfer.attention.self_masked import SelfMaskedRows
from dinfer.engine.sequence import SequenceState
from dinfer.kernel.padding import num_padding_rows
from dinfer.kv.pool import KVCachePool
from dinfer.nn.transformer import Transformer
from dinfer.runner.compile import CompiledModel
from dinfer.runner.native_cpu import NativeRunner, is_prepacked

Ids = npt.NDArray[np.int64]


class Runner:
    """A model over a pool. sight: its attention pattern. The body runs as one call of our own
    kernels where the model was loaded for them. compiled: without them, as one graph; False = as
    neither.
    """

    def __init__(
        self,
        model: Transformer,
        pool: KVCachePool,
        sight: AttentionMetadata,
        compiled: bool | None = None,
    ) -> None:
        self.model, self.pool, self.sight = model, pool, sight
        self.windows = [model.shape.window_at(layer) for layer in range(model.shape.layers)]
        self._kinds = frozenset(self.windows)
        self.dense = (
            NativeRunner(model, pool) if compiled is not False and is_prepacked(model) else None
        )
        self.body: Callable[..., Tensor] = model
        if compiled and self.dense is None:
            self.body = CompiledModel(model)
        self.device = pool.device
        # Rows that stand for nothing would be sent to experts, too.
        self._fills_up = not (model.conditioned or model.shape.mixture)

    def forward(self, batch: Many[SequenceState]) -> Tensor:
        """Normed hidden rows [T, D] of the planned rows, one sequence after the other and of each
        one run after the other; stores their K/V. Behind them, in the order of the batch, the rows
        of the sequences' `shadow` positions, of which nothing is stored.
        """
        tokens, positions, slots, soft = [], [], [], []
        spans: dict[int | None, list[Segment]] = defaultdict(list)
        start = 0
        for sequence in batch:
            plan = sequence.plan
            assert plan is not None
            rows, where = plan.index, plan.positions
            for place, given in zip(sequence.places, sequence.inputs(), strict=True):
                tokens.append(given[rows])
                positions.append(where)
                slots.append(place.slots[rows])
                for window in self._kinds:
                    spans[window] += self.sight.spans(sequence, place, where, start, window)
                soft += self._soft(sequence, where, start)
                start += len(plan.rows)
            sequence.canvas.stale[rows] = False
        shades = self._shades(batch, tokens, positions)
        longest = max(len(sequence.canvas) for sequence in batch)
        if self.dense:
            x = self._embed(torch.from_numpy(np.concatenate(tokens)), soft) if soft else None
            return self.dense((*tokens, *positions, *slots), spans[None], longest, x, shades)
        # One array goes to the device, not three: shadow rows have no slots.
        count = start + sum(len(sequence.shadow) for sequence in batch)
        more = np.zeros(num_padding_rows(count, self.device) if self._fills_up else 0, np.int64)
        inputs = np.concatenate((*tokens, more, *positions, more, *slots))
        tokens_T, positions_T, slots_T = torch.split(
            torch.from_numpy(inputs).to(self.device), [count + len(more)] * 2 + [start]
        )
        x_TD = self._embed(tokens_T, soft)
        attend = StoredKV(self.pool, slots_T, longest, self.windows, spans, shades)
        if self.model.conditioned:
            x_TD, open_T = self._condition(batch, x_TD, positions)
            return self.body(x_TD, positions_T, attend, open_T)
        return self.body(x_TD, positions_T, attend)[:count]

    def _embed(self, tokens_T: Tensor, soft: Many[tuple[Tensor, Tensor]]) -> Tensor:
        """Input rows [T, D], with what `_soft` found added."""
        x_TD = self.model.embed(tokens_T)
        for masks, added in soft:
            x_TD = x_TD.index_add(0, masks, added.to(x_TD.dtype))
        return x_TD

    def _shades(
        self, batch: Many[SequenceState], tokens: list[Ids], positions: list[Ids]
    ) -> list[SelfMaskedRows]:
        """Adds the shadow rows to the inputs, and says what they see."""
        shades: list[SelfMaskedRows] = []
        start = 0
        for sequence in batch:
            where = sequence.shadow = sequence.to_shadow()
            if len(where):
                assert sequence.plan is not None
                tokens.append(np.full_like(where, sequence.canvas.mask_id))
                positions.append(where)
                for span in self.sight.spans(sequence, sequence.places[0], where, start):
                    columns = where[span.start - start : span.stop - start]
                    shades.append(SelfMaskedRows(span, torch.from_numpy(columns).to(self.device)))
                start += len(where)
        return shades

    def _soft(
        self, sequence: SequenceState, positions: Ids, offset: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Rows of masks and what is added to their embeddings; nothing for plain sequences."""
        if sequence.soft is None or not sequence.mix:
            return []
        rows = np.flatnonzero(sequence.canvas.masked[positions])
        places = torch.from_numpy(positions[rows]).to(self.device)
        return [
            (torch.from_numpy(rows + offset).to(self.device), sequence.soft[places] * sequence.mix)
        ]

    def _condition(
        self, batch: Many[SequenceState], x_TD: Tensor, positions: Many[Ids]
    ) -> tuple[Tensor, Tensor]:
        """The rows with the inputs of the open ones made, and which these are."""
        parts, open_rows = [], []
        for sequence, where in zip(batch, positions, strict=True):
            first = int(where.searchsorted(sequence.canvas.open_start()))
            open_rows.append(np.arange(len(where)) >= first)
            places = torch.from_numpy(where[first:]).to(self.device)
            soft = sequence.soft
            parts.append(
                x_TD.new_zeros(len(places), x_TD.shape[1]) if soft is None else soft[places]
            )
        is_open = np.concatenate(open_rows)
        open_T, rows = (
            torch.from_numpy(x).to(self.device) for x in (is_open, np.flatnonzero(is_open))
        )
        made = self.model.condition(x_TD[rows], torch.cat(parts))
        return x_TD.index_copy(0, rows, made), open_T
