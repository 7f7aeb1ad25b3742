"""What the automata over bytes and over tokens have in common: a table of transitions.

S states, C columns (bytes, or classes of tokens). table_SC int32: the state after a symbol, -1
where there is none.
"""

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
UNREACHED = 2**30


def distances(sources: Ids, targets: Ids, start_S: Flags) -> Ids:
    """Fewest edges (`sources[i]` to `targets[i]`) from a state of `start_S` to each state, [S]
    int64; UNREACHED where there is no way.
    """
    found = np.where(start_S, 0, UNREACHED)
    order = sources.argsort(kind="stable")
    targets, bounds = targets[order], sources[order].searchsorted(np.arange(len(start_S) + 1))
    frontier, steps = np.flatnonzero(start_S), 0
    while len(frontier):
        steps += 1
        low, count = bounds[frontier], bounds[frontier + 1] - bounds[frontier]
        within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        after = np.unique(targets[np.repeat(low, count) + within])
        frontier = after[found[after] == UNREACHED]
        found[frontier] = steps
    return found


def edges(table_SC: Table) -> tuple[Ids, Ids, Ids]:
    """(from, column, to) of every transition, in the order of the first two."""
    source, column = table_SC.__ge__(0).nonzero()
    return source, column, table_SC[source, column].astype(np.int64)


def trimmed(table_SC: Table, accepts_S: Flags) -> tuple[Table, Flags]:
    """Without the states that no way leads to, or from which none leads to an accepting one. State
    0 stays the first; nothing is left where it leads to none itself.
    """
    source, _, target = edges(table_SC)
    first = np.arange(len(accepts_S)) == 0
    kept = (distances(source, target, first) < UNREACHED) & (
        distances(target, source, accepts_S) < UNREACHED
    )
    if not kept[:1].any():
        return table_SC[:0], accepts_S[:0]
    number = np.append(np.where(kept, kept.cumsum() - 1, -1), -1).astype(np.int32)
    return number[table_SC[kept]], accepts_S[kept]


def unique_columns(table_SC: npt.NDArray[np.int32]) -> tuple[Ids, Ids]:
    """A column of each kind, [C'], and the kind of every column, [C]."""
    columns = np.ascontiguousarray(table_SC.T)
    if not columns.shape[1]:
        return np.zeros(min(1, len(columns)), np.int64), np.zeros(len(columns), np.int64)
    whole = columns.view(np.dtype((np.void, columns.shape[1] * columns.itemsize))).reshape(-1)
    _, first, kind = np.unique(whole, return_index=True, return_inverse=True)
    return first, kind.reshape(-1)


def merged(table_SC: Table, accepts_S: Flags) -> tuple[Table, Flags]:
    """The same language with the fewest states, of a trimmed automaton (Moore's algorithm)."""
    short = table_SC[:, unique_columns(table_SC)[0]]
    kind, kinds = accepts_S.astype(np.int32), len(np.unique(accepts_S))
    while True:
        # Column 0 is the state's own kind; kind -1 is that of no state.
        after = np.where(short < 0, -1, kind[short])
        first, refined = unique_columns(np.column_stack([kind, after]).astype(np.int32).T)
        if len(first) == kinds:
            break
        kind, kinds = refined.astype(np.int32), len(first)
    # The kind of state 0 gets the number 0.
    number = np.empty(kinds, np.int32)
    order = np.argsort(first != first[refined[0]], kind="stable")
    number[order] = np.arange(kinds)
    chosen = first[order]
    table = table_SC[chosen]
    return np.where(table < 0, -1, number[refined[table]]).astype(np.int32), accepts_S[chosen]
