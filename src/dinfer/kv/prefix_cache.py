"""Leading text of earlier requests whose keys and values free pages still hold, found again by its
tokens.

Only for block-causal models, where the keys and values of a finished block depend on nothing but
the tokens up to its end.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dinfer.step import PAGE

Ids = npt.NDArray[np.int64]


@dataclass(eq=False)
class Node:
    """The pages of one unit of text, below those of all text before it. used: when last; queued:
    whether the heap of leaves holds it.
    """

    key: bytes
    parent: "Node | None"
    pages: list[int]
    used: int
    children: dict[bytes, "Node"] = field(default_factory=dict)
    queued: bool = False


class PrefixCache:
    """A tree of units, the shortest runs of positions that are whole pages and whole blocks.

    It holds no page: who needs memory takes the least recently used units (`evict`). A unit leaves
    before the text in front of it does. `salt` separates the texts of callers that must not see
    from the time of an answer what others have asked.
    """

    def __init__(self, block: int) -> None:
        self.unit = math.lcm(PAGE, block)
        self.pages: set[int] = set()
        self._root = Node(b"", None, [], 0)
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        """A heap by the time of last use when it was pushed; each leaf is in it once."""
        self._numbers = itertools.count()

    def match(self, tokens: Ids, salt: str = "") -> list[int]:
        """Pages of the longest known beginning of `tokens`."""
        node, found = self._root, []
        self._clock += 1
        for key in self._keys(tokens, salt):
            if key not in node.children:
                break
            node = node.children[key]
            node.used = self._clock
            found += node.pages
        return found

    def insert(self, tokens: Ids, pages: list[int], salt: str = "") -> None:
        """Notes which pages hold `tokens`, as far as they are whole units and not known yet."""
        node, size = self._root, self.unit // PAGE
        self._clock += 1
        for number, key in enumerate(self._keys(tokens, salt)):
            new = key not in node.children
            if new:
                own = pages[number * size : (number + 1) * size]
                node.children[key] = Node(key, node, own, self._clock)
                self.pages.update(own)
            node = node.children[key]
            node.used = self._clock
        if len(tokens) >= self.unit and new:
            self._push(node)

    def evict(self, idle: Callable[[int], bool], count: int = 1) -> list[int]:
        """Drops the least recently used units that have nothing below them and whose pages are all
        idle, until they give `count` pages or there is none left; gives their pages. Takes
        O(log n) for each unit.
        """
        found: list[int] = []
        busy: list[Node] = []
        while self._leaves and len(found) < count:
            pushed, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children:
                continue  # it comes back when it has none
            if node.used > pushed:
                self._push(node)
            elif not all(map(idle, node.pages)):
                busy.append(node)
            else:
                found += self._drop(node)
        for node in busy:
            self._push(node)
        return found

    def _drop(self, node: Node) -> list[int]:
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root of the prefix cache holds no pages")
        del parent.children[node.key]
        self.pages.difference_update(node.pages)
        if not parent.children and parent.parent is not None:
            self._push(parent)
        return node.pages

    def _push(self, leaf: Node) -> None:
        if leaf.queued:
            return
        leaf.queued = True
        heapq.heappush(self._leaves, (leaf.used, next(self._numbers), leaf))

    def _keys(self, tokens: Ids, salt: str) -> Iterator[bytes]:
        mark = salt.encode()
        for start in range(0, len(tokens) - self.unit + 1, self.unit):
            yield mark + tokens[start : start + self.unit].tobytes()
