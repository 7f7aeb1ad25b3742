"""The best way to fill a canvas so that the whole answer is accepted, and a random one.

P positions of the answer, S states and C classes of a token automaton, R positions that have
scores. A path names a class for each of these; the state that it is in at a position, and the one
behind it, are fixed by it. So any of its tokens may be set, in any order and to any token of its
class: the rest of the path completes them.

The recursions are those of hidden Markov models (Rabiner 1989): from the right border the best, or
the total, weight of all ways to a complete answer, then from the left border the choice. With the
best way as the only proposal for several positions at once, cf. DINGO (arXiv 2505.23061).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dinfer.structured_output.automaton import TokenAutomaton
from dinfer.structured_output.graph import Ids

Scores = npt.NDArray[np.float64]


class NoPath(ValueError):
    """No tokens in the free positions make the answer one that the constraint accepts."""


@dataclass(frozen=True)
class Answer:
    """What is known of an answer.

    class_P: the class of the token that is set in a position (it stays what it is), -1 where any
    may stand. scored: rising positions that have scores, [R] int64; any other free position fits
    whatever the path needs there. end_from: the first position where an end of text may stand.
    """

    class_P: Ids
    scored: Ids
    end_from: int

    @property
    def open_from(self) -> int:
        """The first position that is free."""
        free = self.class_P < 0
        return int(free.argmax()) if free.any() else len(free)


def best_path(automaton: TokenAutomaton, answer: Answer, score_RC: Scores) -> Ids:
    """Classes [R] of the path whose scores (log probabilities of the best token of each class) add
    up to most; ties go to the lower class. Raises NoPath.
    """
    search = _Search(automaton, answer, score_RC, total=False)
    return search.walk(lambda weights, row: int(weights.argmax()))


def random_path(
    automaton: TokenAutomaton, answer: Answer, score_RC: Scores, uniform_R: Scores
) -> Ids:
    """Classes [R] of a path that is drawn with a probability proportional to `exp` of the sum of
    its scores (log probabilities of all tokens of a class together), by backward sampling: the
    totals of all ways come from the right, the draws from the left. uniform_R: in (0, 1). Raises
    NoPath.
    """
    search = _Search(automaton, answer, score_RC, total=True)

    def draw(weights: Scores, row: int) -> int:
        mass = np.exp(weights - weights.max()).cumsum()
        return int(mass.searchsorted(uniform_R[row] * mass[-1], side="right"))

    return search.walk(draw)


def check_fits(automaton: TokenAutomaton, answer: Answer) -> None:
    """Raises NoPath where the answer cannot be completed."""
    unscored = replace(answer, scored=np.empty(0, np.int64))
    _Search(automaton, unscored, np.empty((0, automaton.num_classes)), total=False)


class _Search:
    """Weights of all ways from each position on, and walks along them."""

    def __init__(
        self, automaton: TokenAutomaton, answer: Answer, score_RC: Scores, total: bool
    ) -> None:
        self._automaton, self._answer, self._total = automaton, answer, total
        self._table = automaton.table_SC
        self._score_RC = score_RC
        self._row_P = np.full(len(answer.class_P), -1)
        self._row_P[answer.scored] = np.arange(len(answer.scored))
        self._open = answer.open_from
        self._state = self._known_state()
        self._weights = self._from_the_right()
        if not np.isfinite(self._weights[0][self._state]):
            raise NoPath

    def _known_state(self) -> int:
        """After the tokens before the first free position."""
        state = 0
        for kind in self._answer.class_P[: self._open].tolist():
            state = int(self._table[state, kind]) if kind >= 0 else -1
            if state < 0:
                raise NoPath
        return state

    def _from_the_right(self) -> list[Scores]:
        """The weight of the rest [S] in front of every position from the first free one on, until
        nothing but free positions without scores follows.
        """
        answer, automaton = self._answer, self._automaton
        length = len(answer.class_P)
        known = np.flatnonzero((answer.class_P >= 0) | (self._row_P >= 0))
        stop = max(int(known[-1]) + 1 if len(known) else 0, self._open)
        may_end = answer.end_from < length
        stop = max(stop, answer.end_from) if may_end else stop
        weights = [np.where(automaton.completes(length - stop, may_end), 0.0, -np.inf)]
        for position in range(stop - 1, self._open - 1, -1):
            weights.append(self._before(position, weights[-1]))
        return weights[::-1]

    def _before(self, position: int, after_S: Scores) -> Scores:
        """The weights in front of a position, from those behind it."""
        kind, row = int(self._answer.class_P[position]), int(self._row_P[position])
        if kind >= 0:
            moved = self._table[:, kind]
            return np.where(moved >= 0, after_S[moved], -np.inf)
        _, column, target = self._automaton.edges
        each = after_S[target]
        if row >= 0:
            each = each + self._score_RC[row][column]
        if position < self._answer.end_from:
            each[column == self._automaton.end_class] = -np.inf
        return self._by_source(each, self._total and row >= 0)

    def _by_source(self, each_E: Scores, total: bool) -> Scores:
        """The best, or the total, of the weights of the edges that leave each state."""
        leaving, begins, counts = self._automaton.groups
        best = np.maximum.reduceat(each_E, begins)
        if total:
            shift = np.where(np.isfinite(best), best, 0.0)
            mass = np.add.reduceat(np.exp(each_E - np.repeat(shift, counts)), begins)
            with np.errstate(divide="ignore"):
                best = shift + np.log(mass)
        found = np.full(self._automaton.num_states, -np.inf)
        found[leaving] = best
        return found

    def walk(self, choose: Callable[[Scores, int], int]) -> Ids:
        """The classes of a path. choose: of the weights of all ways on, [C], for a row."""
        state, path = self._state, np.empty(len(self._answer.scored), np.int64)
        last = int(self._answer.scored[-1]) if len(path) else -1
        for position in range(self._open, last + 1):
            kind, row = int(self._answer.class_P[position]), int(self._row_P[position])
            if kind < 0:
                kind = self._step(state, position, row, choose)
            if row >= 0:
                path[row] = kind
            state = int(self._table[state, kind])
        return path

    def _step(
        self, state: int, position: int, row: int, choose: Callable[[Scores, int], int]
    ) -> int:
        target = self._table[state]
        weights = self._weights[position + 1 - self._open]
        ways = np.where(target >= 0, weights[target], -np.inf)
        if position < self._answer.end_from and self._automaton.end_class is not None:
            ways[self._automaton.end_class] = -np.inf
        # Without scores any way on will do that is the best for the rest.
        return int(ways.argmax()) if row < 0 else choose(ways + self._score_RC[row], row)
