"""Runs plans: one ragged forward for all rows of all sequences. Names no strategy.

T rows, D hidden, H heads, K key/value heads, d head size.
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.engine.graphs import Graph
from dinfer.engine.pool import Pool
from dinfer.engine.sequence import Place, Sequence
from dinfer.kernel.attention import Span, attention, grouped
from dinfer.kernel.shadow import Shade, shadow_attention
from dinfer.nn.attention import Attend
from dinfer.nn.transformer import Transformer
from dinfer.step import StepPlan

Ids = npt.NDArray[np.int64]


class Runner:
    """A model over a pool. block: length of its attention blocks, None for full attention.
    compiled: the body runs as one graph.
    """

    def __init__(
        self, model: Transformer, pool: Pool, block: int | None, compiled: bool = False
    ) -> None:
        self.model, self.pool, self.block = model, pool, block
        self.body: Callable[[Tensor, Tensor, Attend], Tensor] = Graph(model) if compiled else model
        self.device = pool.arena.device

    def forward(self, batch: Many[Sequence]) -> Tensor:
        """Normed hidden rows [T, D] of the planned rows, one sequence after the other and of each
        one run after the other; stores their K/V. Behind them, in the order of the batch, the rows
        of the sequences' `shadow` positions, of which nothing is stored.
        """
        tokens, positions, slots, spans, soft = [], [], [], [], []
        start = 0
        for sequence in batch:
            plan = sequence.plan
            assert plan is not None
            rows = plan.index
            where = np.arange(len(sequence.canvas))[rows]
            for place, given in zip(sequence.places, sequence.inputs(), strict=True):
                tokens.append(given[rows])
                positions.append(where)
                slots.append(place.slots[rows])
                spans += self._spans(plan, where, place, start)
                soft += self._soft(sequence, where, start)
                start += len(plan.rows)
            sequence.canvas.stale[rows] = False
        shades = self._shades(batch, tokens, positions)
        tokens_T, positions_T, slots_T = (
            torch.from_numpy(np.concatenate(x)).to(self.device) for x in (tokens, positions, slots)
        )
        x_TD = self.model.embed(tokens_T)
        for masks, added in soft:
            x_TD = x_TD.index_add(0, masks, added.to(x_TD.dtype))
        return self._run(x_TD, positions_T, slots_T, spans, shades)

    def _shades(
        self, batch: Many[Sequence], tokens: list[Ids], positions: list[Ids]
    ) -> list[Shade]:
        """Adds the shadow rows to the inputs, and says what they see."""
        shades: list[Shade] = []
        start = 0
        for sequence in batch:
            where = sequence.shadow = sequence.to_shadow()
            if len(where):
                assert sequence.plan is not None
                tokens.append(np.full_like(where, sequence.canvas.mask_id))
                positions.append(where)
                for span in self._spans(sequence.plan, where, sequence.places[0], start):
                    columns = where[span.start - start : span.stop - start]
                    shades.append(Shade(span, torch.from_numpy(columns).to(self.device)))
                start += len(where)
        return shades

    def _soft(self, sequence: Sequence, positions: Ids, offset: int) -> list[tuple[Tensor, Tensor]]:
        """Rows of masks and what is added to their embeddings; nothing for plain sequences."""
        if sequence.soft is None:
            return []
        rows = np.flatnonzero(sequence.canvas.masked[positions])
        places = torch.from_numpy(positions[rows]).to(self.device)
        return [
            (torch.from_numpy(rows + offset).to(self.device), sequence.soft[places] * sequence.mix)
        ]

    def _run(
        self,
        x_TD: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        spans: list[Span],
        shades: list[Shade],
    ) -> Tensor:
        count, groups = len(slots_T), grouped(spans, self.device)

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            keys, values = self.pool.keys(layer), self.pool.values(layer)
            keys.index_copy_(0, slots_T, k_TKd[:count])
            values.index_copy_(0, slots_T, v_TKd[:count])
            mixed = attention(q_THd[:count], keys, values, groups)
            if not shades:
                return mixed
            q, k, v = (x[count:] for x in (q_THd, k_TKd, v_TKd))
            return torch.cat((mixed, shadow_attention(q, k, v, keys, values, shades)))

        return self.body(x_TD, positions_T, attend)

    def _spans(self, plan: StepPlan, positions: Ids, place: Place, offset: int) -> list[Span]:
        """One span of rows for each limit of sight: the plan's, or the end of the row's block."""
        if self.block is None:
            sight = self._sight(place, plan.visible, plan.also)
            return [Span(offset, offset + len(positions), sight)]
        ends = (positions // self.block + 1) * self.block
        cuts = np.flatnonzero(ends[1:] != ends[:-1]) + 1
        return [
            Span(offset + low, offset + high, self._sight(place, min(plan.visible, int(ends[low]))))
            for low, high in itertools.pairwise([0, *cuts.tolist(), len(positions)])
        ]

    def _sight(self, place: Place, stop: int, also: tuple[int, ...] = ()) -> slice | Ids:
        if place.in_one_run and stop and not also:
            first = int(place.slots[0])
            return slice(first, first + stop)
        return np.concatenate((place.slots[:stop], place.slots[list(also)]))
