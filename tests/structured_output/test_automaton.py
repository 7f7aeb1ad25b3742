"""Automata over bytes and tokens against Python's `re`, text by text."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.errors import RequestError
from dinfer.structured_output.automaton import TokenAutomaton
from dinfer.structured_output.byte_automaton import ByteAutomaton

TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", "é".encode(), b"x", b""]
END = 10


def matches(automaton: ByteAutomaton, text: str) -> bool:
    state = 0
    for byte in text.encode():
        state = automaton.table_SB[state, byte]
        if state < 0:
            return False
    return bool(automaton.accepts_S[state])


PATTERNS = [
    "", "ab", "a*", "a|b", "(ab|a)*", "a{2,4}b?", "[ab]c|", "é.", ".*", "[^a]{0,3}", r"\w+", "a?b?",
    "(a|b)*a(a|b){2}", "^ab$", r"a\$", "^a|b$", "(?i)AB*", r"-?\d+(\.\d+)?", "(ab){2}", "c(a|bc?)*",
]  # fmt: skip
UNSPELLABLE = (r"a\$", r"-?\d+(\.\d+)?", "c(a|bc?)*")
"""With the letters of TOKENS."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_are_those_that_python_matches(pattern: str) -> None:
    automaton = ByteAutomaton.of(pattern)
    for length in range(6):
        for letters in itertools.product("abcé1.-$"[: 8 if length < 5 else 4], repeat=length):
            text = "".join(letters)
            assert matches(automaton, text) == bool(re.fullmatch(pattern, text)), text


def test_the_number_of_states_is_the_smallest() -> None:
    """The k-th letter from the end is an a: 2 ** k states, a textbook case."""
    assert [len(ByteAutomaton.of(f"(a|b)*a(a|b){{{k}}}")) for k in (1, 3, 6)] == [4, 16, 128]


def test_a_first_space_may_be_taken_away() -> None:
    automaton = ByteAutomaton.of("a b| c|d").but_first_space()
    texts = [" a b", "a b", " c", "  c", " d", "d", "c"]
    want = [bool(re.fullmatch("a b| c|d", t[1:] if t[0] == " " else t)) for t in texts]
    assert [matches(automaton, text) for text in texts] == want


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "not supported"),
        (r"(a)\1", "not supported"),
        ("(?=a)b", "not supported"),
        (r"\bfoo", "not supported"),
        ("[a&&b]", "not supported"),
        ("(a|b)*a(a|b){18}", "too much memory"),
        ("\ud800", "surrogate"),
    ],
)
def test_what_cannot_be_compiled_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        ByteAutomaton.of(pattern)


def test_a_compilation_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.structured_output.byte_automaton.SECONDS", 0.5)
    with pytest.raises(RequestError, match="took more than"):
        ByteAutomaton.of("(x{1,1000}){1,1000}")


def test_too_many_transitions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dinfer.structured_output.automaton.MAX_EDGES", 5)
    with pytest.raises(RequestError, match="transitions"):
        TokenAutomaton.of(ByteAutomaton.of("[ab]{3}"), TOKENS, frozenset())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_spell_what_matches(pattern: str) -> None:
    """Every sequence of up to three tokens, with and without an end of text."""
    texts = ByteAutomaton.of(pattern)
    if pattern in UNSPELLABLE:
        with pytest.raises(RequestError, match="cannot spell"):
            TokenAutomaton.of(texts, TOKENS, frozenset({END}))
        return
    automaton = TokenAutomaton.of(texts, TOKENS, frozenset({END}))
    assert automaton.end_class is not None
    for length in range(4):
        for ids in itertools.product(range(len(TOKENS)), repeat=length):
            body = list(itertools.takewhile(lambda v: v != END, ids))
            spelled = 0 not in body and set(ids[len(body) :]) <= {END}
            assert accepted(automaton, ids) == (spelled and is_match(pattern, body)), ids


def is_match(pattern: str, ids: list[int]) -> bool:
    """Whether the tokens are a text, and one that matches."""
    try:
        text = b"".join(TOKENS[v] for v in ids).decode()
    except UnicodeDecodeError:
        return False
    return bool(re.fullmatch(pattern, text))


def accepted(automaton: TokenAutomaton, ids: tuple[int, ...]) -> bool:
    state = 0
    for token in ids:
        kind = automaton.class_V[token]
        state = automaton.table_SC[state, kind] if kind >= 0 else -1
        if state < 0:
            return False
    return bool(automaton.accepts_S[state])


def test_tokens_that_do_the_same_are_one_class() -> None:
    tokens = [b'"', b"a", b"b", b"cc", b'"a']
    automaton = TokenAutomaton.of(ByteAutomaton.of('"[^"]*"'), tokens, frozenset())
    kinds = automaton.class_V.tolist()
    assert kinds[1] == kinds[2] == kinds[3] and len({kinds[0], kinds[1], kinds[4]}) == 3
    assert automaton.shortest == 2
    order, counts = automaton.tokens
    assert automaton.class_V[order.numpy()].tolist() == np.repeat(np.arange(3), counts).tolist()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 8), st.sampled_from(["a*b", "(ab){2}", "a{3}|b", "(aab|x)*"]))
def test_which_lengths_can_be_filled(count: int, pattern: str) -> None:
    automaton = TokenAutomaton.of(ByteAutomaton.of(pattern), TOKENS, frozenset({END}))
    letters = [v for v in range(1, 10) if automaton.class_V[v] >= 0]

    def any_of(length: int) -> bool:
        return any(accepted(automaton, ids) for ids in itertools.product(letters, repeat=length))

    some = [any_of(length) for length in range(min(count, 5) + 1)]
    if count <= 5:
        assert automaton.completes(count, False)[0] == some[count]
    assert not any(some) or automaton.completes(count, True)[0]
    assert automaton.shortest == next(n for n in range(9) if any_of(n))
