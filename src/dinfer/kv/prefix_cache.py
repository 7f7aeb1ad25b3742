"""What free pages still hold: leading text of earlier requests, found again by its tokens.

Only for block-causal models, where the keys and values of a finished block depend on nothing but
the tokens up to its end.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dinfer.step import PAGE

Ids = npt.NDArray[np.int64]


@dataclass(eq=False)
class Node:
    """The pages of one unit of text, below those of all text before it. used: when last."""

    key: bytes
    parent: "Node | None"
    pages: list[int]
    used: int
    children: dict[bytes, "Node"] = field(default_factory=dict)


class PrefixCache:
    """A tree of units, the shortest runs of positions that are whole pages and whole blocks.

    It holds no page: whoever needs memory takes the oldest unused unit (`evict`). A unit leaves
    before the text in front of it does, since nothing is below it.
    """

    def __init__(self, block: int) -> None:
        self.unit = math.lcm(PAGE, block)
        self.pages: set[int] = set()
        self._root = Node(b"", None, [], 0)
        self._clock = 0

    def match(self, tokens: Ids) -> list[int]:
        """Pages of the longest known beginning of `tokens`."""
        node, found = self._root, []
        self._clock += 1
        for key in self._keys(tokens):
            if key not in node.children:
                break
            node = node.children[key]
            node.used = self._clock
            found += node.pages
        return found

    def insert(self, tokens: Ids, pages: list[int]) -> None:
        """Notes which pages hold `tokens`, as far as they are whole units and not known yet."""
        node, incref = self._root, self.unit // PAGE
        self._clock += 1
        for number, key in enumerate(self._keys(tokens)):
            if key not in node.children:
                own = pages[number * incref : (number + 1) * incref]
                node.children[key] = Node(key, node, own, self._clock)
                self.pages.update(own)
            node = node.children[key]
            node.used = self._clock

    def evict(self, idle: Callable[[int], bool]) -> list[int]:
        """Drops the oldest unit that has nothing below it and whose pages are all idle; gives its
        pages, none where there is no such unit.
        """
        ends = [n for n in self._nodes(self._root) if not n.children and all(map(idle, n.pages))]
        if not ends:
            return []
        oldest = min(ends, key=lambda node: node.used)
        assert oldest.parent is not None
        del oldest.parent.children[oldest.key]
        self.pages.difference_update(oldest.pages)
        return oldest.pages

    def _keys(self, tokens: Ids) -> Iterator[bytes]:
        for start in range(0, len(tokens) - self.unit + 1, self.unit):
            yield tokens[start : start + self.unit].tobytes()

    def _nodes(self, node: Node) -> Iterator[Node]:
        for child in node.children.values():
            yield child
            yield from self._nodes(child)
