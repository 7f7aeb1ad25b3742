"""The automaton of a constraint over the tokens of a model.

S states, C classes of tokens, V vocabulary, N tokens that fit somewhere, E edges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dinfer.errors import RequestError
from dinfer.structured_output.byte_automaton import ByteAutomaton
from dinfer.structured_output.graph import (
    Flags,
    Ids,
    Table,
    distances,
    edges,
    trimmed,
    unique_columns,
)

MAX_EDGES = 500_000
"""Most transitions by class of token: a step goes through them once for each position."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Which token may follow which. State 0 is the first one; tokens that do the same in every
    state are one class.

    table_SC: the state after a token of a class, -1 where there is none. accepts_S: whether the
    answer is complete. class_V: the class of each token, -1 of those that fit nowhere. end_class:
    that of the end-of-text tokens, which lead from every complete answer to `end_state`, where
    nothing but further ones follows; None where the model has none.
    """

    table_SC: Table
    accepts_S: Flags
    class_V: Table
    end_class: int | None
    _exact: dict[int, Flags] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, texts: ByteAutomaton, token_bytes: Sequence[bytes], ends: frozenset[int]
    ) -> "TokenAutomaton":
        """token_bytes: what each token adds to a text, [V]; b"" for a token that is no text.
        Raises RequestError where no tokens spell a text, or too many states would be needed.
        """
        texts_only = [b"" if v in ends else text for v, text in enumerate(token_bytes)]
        table, class_V = _by_token(texts, texts_only)
        table, accepts = trimmed(table, texts.accepts_S)
        if not len(table):
            raise RequestError("The vocabulary of this model cannot spell any text that matches.")
        first, kind = unique_columns(table)
        alive = (table[:, first] >= 0).any(axis=0)
        number = np.where(alive, alive.cumsum() - 1, -1)[kind].astype(np.int32)
        table, class_V = table[:, first[alive]], number[class_V]
        ends = frozenset(v for v in ends if 0 <= v < len(class_V))
        if not ends:
            return cls._checked(table, accepts, class_V, None)
        size, width = table.shape
        whole = np.full((size + 1, width + 1), -1, np.int32)
        whole[:size, :width] = table
        whole[:size, width][accepts] = size
        whole[size, width] = size
        class_V[list(ends)] = width
        return cls._checked(whole, np.append(accepts, True), class_V, width)

    @classmethod
    def _checked(
        cls, table: Table, accepts: Flags, class_V: Table, end_class: int | None
    ) -> "TokenAutomaton":
        count = int((table >= 0).sum())
        if count > MAX_EDGES:
            raise RequestError(
                f"The constraint has {count} transitions and at most {MAX_EDGES} are allowed;"
                " use fewer or smaller counts ({m,n}, maxLength, maxItems)."
            )
        return cls(table, accepts, class_V, end_class)

    @property
    def num_states(self) -> int:
        """States, that after the end of text included."""
        return len(self.table_SC)

    @property
    def num_classes(self) -> int:
        """Classes of tokens."""
        return int(self.table_SC.shape[1])

    @cached_property
    def edges(self) -> tuple[Ids, Ids, Ids]:
        """(from, class, to) of every transition, in the order of the first two."""
        return edges(self.table_SC)

    @cached_property
    def groups(self) -> tuple[Ids, Ids, Ids]:
        """The states that edges leave, where those of each begin, and how many they are."""
        found = np.unique(self.edges[0], return_index=True, return_counts=True)
        return found[0], found[1], found[2]

    @cached_property
    def text_edges(self) -> tuple[Ids, Ids, Ids]:
        """Those without the end of text."""
        source, column, target = self.edges
        text = column != self.end_class
        return source[text], column[text], target[text]

    @cached_property
    def shortest_S(self) -> Ids:
        """Fewest tokens from each state to a complete answer."""
        source, _, target = self.text_edges
        return distances(target, source, self.accepts_S)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest answer, without an end of text."""
        return int(self.shortest_S[0])

    def completes(self, count: int, may_end: bool) -> Flags:
        """From which states `count` free positions can be filled so that the answer is complete,
        [S]; may_end: with an end of text and what follows it, where the model has one.
        """
        if may_end and self.end_class is not None:
            return self.shortest_S <= count
        known = max((n for n in self._exact if n <= count), default=-1)
        found = self._exact[known] if known >= 0 else self._without_end
        self._exact.setdefault(0, self._without_end)
        source, _, target = self.text_edges
        for n in range(max(known, 0) + 1, count + 1):
            after = np.zeros_like(found)
            after[source[found[target]]] = True
            found = self._exact[n] = after
        return found

    @cached_property
    def _without_end(self) -> Flags:
        """Complete answers that no end of text has closed."""
        text = self.accepts_S.copy()
        if self.end_class is not None:
            text[-1] = False
        return text

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """The tokens that fit somewhere, class by class, [N] int64, and how many there are of each
        class, [C] int64.
        """
        order = np.argsort(self.class_V, kind="stable")
        order = order[int((self.class_V < 0).sum()) :]
        counts = np.bincount(self.class_V[order], minlength=self.num_classes)
        return torch.from_numpy(order), torch.from_numpy(counts)


def _by_token(texts: ByteAutomaton, token_bytes: Sequence[bytes]) -> tuple[Table, Table]:
    """The state after each kind of token [S, K], and the kind of each token [V].

    Goes through the tokens byte by byte, all at once. What beginnings do to every state is kept
    once for all tokens that begin alike, or otherwise but with the same effect: few columns,
    however large the vocabulary.
    """
    size = len(texts)
    byte_table, byte_kind = _compact(texts.table_SB)
    sink = np.full((1, byte_table.shape[1]), size, np.int32)
    byte_table = np.vstack([np.where(byte_table < 0, size, byte_table), sink])
    lengths = np.fromiter(map(len, token_bytes), np.int64, len(token_bytes))
    joined = byte_kind[np.frombuffer(b"".join(token_bytes), np.uint8)]
    begins = lengths.cumsum() - lengths
    columns = np.arange(size, dtype=np.int32)[:, None]  # the empty text changes no state
    kind = np.zeros(len(token_bytes), np.int64)
    finished, total = [np.full((size, 1), size, np.int32)], 1
    result = np.zeros(len(token_bytes), np.int64)
    live = np.flatnonzero(lengths)
    for depth in range(int(lengths.max(initial=0))):
        key = kind[live] * byte_table.shape[1] + joined[begins[live] + depth]
        keys, which = np.unique(key, return_inverse=True)
        parent, byte = np.divmod(keys, byte_table.shape[1])
        after = byte_table[columns[:, parent], byte[None]]
        first, same = unique_columns(after)
        columns, kind[live] = after[:, first], same[which]
        done = lengths[live] == depth + 1
        result[live[done]] = kind[live[done]] + total
        finished.append(columns)
        total += columns.shape[1]
        alive = np.flatnonzero((columns < size).any(axis=0))
        live = live[~done & np.isin(kind[live], alive)]
    # Columns of beginnings that are no token themselves go.
    used, result = np.unique(result, return_inverse=True)
    table = np.concatenate(finished, axis=1)[:, used]
    return np.where(table == size, -1, table).astype(np.int32), result.astype(np.int32)


def _compact(table: Table) -> tuple[Table, Ids]:
    """The columns that differ, and which of them each column is."""
    first, kind = unique_columns(table)
    return table[:, first], kind
