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
from dinfer.engine.sequence import Sequence
from dinfer.kernel.attention import Span, attention, grouped
from dinfer.nn.attention import Attend
from dinfer.nn.transformer import Transformer


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
        """Normed hidden rows [T, D] of the planned rows, one sequence after the other; stores
        their K/V.
        """
        tokens, positions, slots, spans = [], [], [], []
        start = 0
        for sequence in batch:
            plan = sequence.plan
            assert plan is not None
            rows = slice(plan.rows.start, plan.rows.stop)
            tokens.append(sequence.canvas.tokens[rows])
            positions.append(np.arange(rows.start, rows.stop))
            slots.append(sequence.slots[rows])
            spans += self._spans(sequence, start)
            sequence.canvas.stale[rows] = False
            start += len(plan.rows)
        tokens_T, positions_T, slots_T = (
            torch.from_numpy(np.concatenate(x)).to(self.device) for x in (tokens, positions, slots)
        )
        return self._run(tokens_T, positions_T, slots_T, spans)

    def _run(
        self, tokens_T: Tensor, positions_T: Tensor, slots_T: Tensor, spans: list[Span]
    ) -> Tensor:
        groups = grouped(spans, self.device)

        def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
            keys, values = self.pool.keys(layer), self.pool.values(layer)
            keys.index_copy_(0, slots_T, k_TKd)
            values.index_copy_(0, slots_T, v_TKd)
            return attention(q_THd, keys, values, groups)

        return self.body(self.model.embed(tokens_T), positions_T, attend)

    def _spans(self, sequence: Sequence, offset: int) -> list[Span]:
        """One span of rows for each limit of sight: the plan's, or the end of the row's block."""
        plan = sequence.plan
        assert plan is not None
        edges = [plan.rows.start, plan.rows.stop]
        if self.block is not None:
            first = (plan.rows.start // self.block + 1) * self.block
            edges[1:1] = range(first, plan.rows.stop, self.block)
        spans = []
        for low, high in itertools.pairwise(edges):
            sight = (
                plan.visible
                if self.block is None
                else min(plan.visible, -(-high // self.block) * self.block)
            )
            spans.append(
                Span(
                    offset + low - edges[0], offset + high - edges[0], self._sight(sequence, sight)
                )
            )
        return spans

    def _sight(self, sequence: Sequence, stop: int) -> slice | npt.NDArray[np.int64]:
        if sequence.in_one_run and stop:
            first = int(sequence.slots[0])
            return slice(first, first + stop)
        return sequence.slots[:stop]
