"""A deterministic automaton over bytes, from a regular expression.

S states, B = 256 bytes.
"""

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dinfer.errors import RequestError
from dinfer.structured_output.graph import Flags, Table, merged, trimmed

SECONDS = 10.0
"""Time in which an expression must be compiled."""
MAX_TRANSITIONS = 500_000
"""Most transitions before the states that nothing tells apart are merged."""
END = "\U0010ffff".encode()
"""A character that Unicode keeps free, put behind every text."""
_UNSUPPORTED = 3


@dataclass(frozen=True)
class ByteAutomaton:
    """State 0 is the first one. table_SB: the state after a byte, -1 where the text cannot go on;
    accepts_S: whether the text may end.
    """

    table_SB: Table
    accepts_S: Flags

    @classmethod
    def of(cls, pattern: str) -> "ByteAutomaton":
        """Of the texts that match the expression as a whole, with the fewest states. Raises
        RequestError where it is not supported, or takes too many states or too long.
        """
        found = np.frombuffer(_run(pattern), np.int32)
        count = int(found[1])
        finals, moves = found[2 : 2 + count], found[2 + count :].reshape(-1, 3)
        # Numbers of the library's states, with the initial one first.
        known = np.unique(np.concatenate([finals, moves[:, 0], moves[:, 2], found[:1]]))
        number = np.empty(len(known), np.int32)
        number[np.argsort(known != found[0], kind="stable")] = np.arange(len(known))
        table = np.full((len(known), 256), -1, np.int32)
        source, target = (number[known.searchsorted(moves[:, i])] for i in (0, 2))
        table[source, moves[:, 1]] = target
        done = cls(*_without_end(table, number[known.searchsorted(finals)]))
        if not len(done):
            raise RequestError(f"No text matches the regular expression {_short(pattern)}.")
        return done.merged()

    def merged(self) -> "ByteAutomaton":
        """The same with the fewest states."""
        return ByteAutomaton(*merged(self.table_SB, self.accepts_S))

    def __len__(self) -> int:
        return len(self.accepts_S)

    def but_first_space(self) -> "ByteAutomaton":
        """Of the texts that match once a first space, where there is one, is taken away."""
        # A new first state, as others may lead back to the old one.
        table = np.where(self.table_SB < 0, -1, self.table_SB + 1)
        first = table[:1].copy()
        first[0, ord(" ")] = 1
        return ByteAutomaton(
            np.vstack([first, table]).astype(np.int32),
            np.append(self.accepts_S[:1], self.accepts_S),
        )


def _without_end(table_SB: Table, finals: Table) -> tuple[Table, Flags]:
    """A text may end where END leads to a final state; END itself is no part of any text.

    outlines-core (0.2.14) leaves out the transitions of an accepting state to states that do not
    accept, so no state but the very last may accept while it is at work.
    """
    final = np.zeros(len(table_SB) + 1, bool)  # with one more for the state -1
    final[finals] = True
    state = np.arange(len(table_SB))
    for byte in END:
        state = np.where(state < 0, -1, table_SB[state, byte])
    return trimmed(np.where(final[table_SB], -1, table_SB).astype(np.int32), final[state])


def _unanchored(pattern: str) -> str:
    """Without the anchors at its ends, which say nothing where all of a text must match."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2
    return pattern if escaped else body


def _run(pattern: str) -> bytes:
    """What the process wrote."""
    if find_spec("outlines_core") is None:
        raise RequestError(
            "Structured output needs the package outlines-core; install it with"
            " pip install 'dinfer[structured]'."
        )
    script = str(Path(__file__).with_name("dfa_process.py"))
    command = [sys.executable, "-P", script, str(MAX_TRANSITIONS)]
    try:
        asked = f"(?:{_unanchored(pattern)})\\x{{10FFFF}}".encode()
        done = subprocess.run(command, input=asked, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RequestError(
            f"The constraint took more than {SECONDS:g} seconds to compile; make it simpler."
        ) from error
    except UnicodeEncodeError as error:
        raise RequestError("The regular expression holds half a surrogate pair.") from error
    if done.returncode == _UNSUPPORTED:
        raise RequestError(
            f"The regular expression {_short(pattern)} is not supported: it must be well formed,"
            " be matched by some text, and be without look-around, references back,"
            " word boundaries and anchors within."
        )
    if done.returncode:
        raise RequestError(
            "The constraint needs too much memory to compile; use fewer or smaller counts"
            " ({m,n}, maxLength, maxItems)."
        )
    return done.stdout


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
