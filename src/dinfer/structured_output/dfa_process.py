"""A script, not a module: compiles a regular expression to an automaton over bytes.

An expression of a few characters may need more states than memory holds, and the library that finds
them cannot be interrupted; a process of its own can be given limits and ended.

Reads the expression from standard input; writes the initial state, the number of final states,
these, and (from, byte, to) of every transition, as int32. Exits with 3 where the expression is not
supported, with 4 where it has more transitions than the number that is given as the argument.
"""

import array
import sys

from outlines_core import Index, Vocabulary

MEMORY = 2**30
"""Bytes of address space."""
NO_BYTE = 256


def main() -> None:
    """Compiles what standard input holds."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    pattern = sys.stdin.buffer.read().decode()
    try:
        index = Index(pattern, Vocabulary(NO_BYTE, {bytes([b]): [b] for b in range(NO_BYTE)}))
    except ValueError:
        sys.exit(3)
    found = index.get_transitions()
    if sum(map(len, found.values())) > int(sys.argv[1]):
        sys.exit(4)
    finals = sorted(index.get_final_states())
    out = array.array("i", [index.get_initial_state(), len(finals), *finals])
    for state, moves in found.items():
        for byte, after in moves.items():
            if byte != NO_BYTE:
                out.extend((state, byte, after))
    sys.stdout.buffer.write(out.tobytes())


main()
