"""The search along a canvas against going through all ways to fill it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.structured_output.automaton import TokenAutomaton
from dinfer.structured_output.byte_automaton import ByteAutomaton
from dinfer.structured_output.path_search import (
    Answer,
    NoPath,
    best_path,
    check_fits,
    random_path,
)

TOKENS = [b"a", b"b", b"ab", b"c", b"", b""]
END = 4
PATTERNS = ["a*b", "(ab|c)+", "a{2,3}(bc?)*", "[abc]{3}", "(a|b)*a(a|b)c*", "", "ab|abab|c"]
AUTOMATA = {
    (pattern, ends): TokenAutomaton.of(ByteAutomaton.of(pattern), TOKENS, ends)
    for pattern in PATTERNS
    if pattern
    for ends in (frozenset({END}), frozenset[int]())
}


def accepted(automaton: TokenAutomaton, ids: tuple[int, ...], end_from: int) -> bool:
    state = 0
    for position, token in enumerate(ids):
        kind = automaton.class_V[token]
        if kind < 0 or (token == END and position < end_from):
            return False
        state = automaton.table_SC[state, kind]
        if state < 0:
            return False
    return bool(automaton.accepts_S[state])


def ways(automaton: TokenAutomaton, held: list[int], end_from: int) -> list[tuple[int, ...]]:
    """All ways to fill the positions that hold -1."""
    choices = [range(5) if token < 0 else [token] for token in held]
    return [ids for ids in itertools.product(*choices) if accepted(automaton, ids, end_from)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[TokenAutomaton, list[int], Answer, np.ndarray]:
    automaton = draw(st.sampled_from(list(AUTOMATA.values())))
    length = draw(st.integers(1, 5))
    end_from = draw(st.integers(0, 1)) * draw(st.integers(0, length))
    held = draw(st.lists(st.sampled_from([-1, -1, -1, 0, 1, 3]), min_size=length, max_size=length))
    free = [p for p, token in enumerate(held) if token < 0]
    scored = [p for p in free if draw(st.booleans())]
    score_RV = np.random.default_rng(draw(st.integers(0, 10**6))).normal(size=(len(scored), 5))
    kinds = np.array([-1 if t < 0 else automaton.class_V[t] for t in held], np.int64)
    if any(t >= 0 and automaton.class_V[t] < 0 for t in held):
        kinds = np.full(length, -1)
        held = [-1] * length
        scored = []
        score_RV = np.empty((0, 5))
    return automaton, held, Answer(kinds, np.array(scored, np.int64), end_from), score_RV


def by_class(automaton: TokenAutomaton, score_RV: np.ndarray, total: bool) -> np.ndarray:
    found = np.full((len(score_RV), automaton.num_classes), -np.inf)
    for token in range(5):
        if (kind := automaton.class_V[token]) >= 0:
            join = np.logaddexp if total else np.maximum
            found[:, kind] = join(found[:, kind], score_RV[:, token])
    return found


@settings(deadline=None, max_examples=300)
@given(cases())
def test_the_best_path_is_the_best_of_all_ways(case) -> None:
    automaton, held, answer, score_RV = case
    all_ways = ways(automaton, held, answer.end_from)
    score_RC = by_class(automaton, score_RV, total=False)
    if not all_ways:
        with pytest.raises(NoPath):
            best_path(automaton, answer, score_RC)
        with pytest.raises(NoPath):
            check_fits(automaton, answer)
        return
    check_fits(automaton, answer)
    most = max(
        sum(score_RV[row, ids[p]] for row, p in enumerate(answer.scored)) for ids in all_ways
    )
    path = best_path(automaton, answer, score_RC)
    assert np.isclose(score_RC[np.arange(len(path)), path].sum(), most)


@settings(deadline=None, max_examples=300)
@given(cases(), st.booleans(), st.integers(0, 10**6))
def test_any_part_of_a_path_in_any_tokens_of_its_classes_can_be_completed(
    case, drawn: bool, seed: int
) -> None:
    automaton, held, answer, score_RV = case
    rng = np.random.default_rng(seed)
    for _ in range(len(held) + 1):
        if not ways(automaton, held, answer.end_from):
            return
        score_RC = by_class(automaton, score_RV, total=drawn)
        if drawn:
            path = random_path(automaton, answer, score_RC, rng.random(len(score_RC)))
        else:
            path = best_path(automaton, answer, score_RC)
        if not len(path):
            return
        # Any subset, at least one.
        chosen = rng.random(len(path)) < 0.5
        chosen[rng.integers(len(path))] = True
        for row in np.flatnonzero(chosen):
            tokens = np.flatnonzero(automaton.class_V[:5] == path[row])
            held[answer.scored[row]] = int(rng.choice(tokens))
        assert ways(automaton, held, answer.end_from)
        kinds = np.array([-1 if t < 0 else automaton.class_V[t] for t in held], np.int64)
        answer = Answer(kinds, answer.scored[~chosen], answer.end_from)
        score_RV = score_RV[~chosen]


@pytest.mark.parametrize("pattern", ["(ab|c)+", "(a|b)*a(a|b)c*"])
def test_drawn_paths_have_their_probabilities(pattern: str) -> None:
    """A chi-square test of 4,000 drawn paths against the products of the probabilities."""
    automaton, length = AUTOMATA[pattern, frozenset({END})], 4
    score_RV = np.random.default_rng(7).normal(size=(length, 5))
    answer = Answer(np.full(length, -1), np.arange(length), 0)
    weights: dict[tuple[int, ...], float] = {}
    for ids in ways(automaton, [-1] * length, 0):
        key = tuple(automaton.class_V[list(ids)].tolist())
        score = sum(score_RV[row, token] for row, token in enumerate(ids))
        weights[key] = weights.get(key, 0.0) + float(np.exp(score))
    total, count = sum(weights.values()), 4000
    score_RC = by_class(automaton, score_RV, total=True)
    rng, seen = np.random.default_rng(3), dict.fromkeys(weights, 0)
    for _ in range(count):
        path = random_path(automaton, answer, score_RC, rng.random(length))
        seen[tuple(path.tolist())] += 1
    expected = {key: count * weight / total for key, weight in weights.items()}
    square = sum((seen[key] - want) ** 2 / want for key, want in expected.items())
    free = len(weights) - 1
    # Mean and variance of the distribution are `free` and `2 * free`; five standard deviations.
    assert free > 5 and abs(square - free) < 5 * (2 * free) ** 0.5
