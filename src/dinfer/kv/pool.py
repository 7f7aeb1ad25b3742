"""The paged K/V pool: one arena a layer, reference-counted pages."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.kv.prefix_cache import PrefixCache
from dinfer.nn.transformer import ModelConfig
from dinfer.step import PAGE


class KVCachePool:
    """Keys and values of all sequences, for each layer [2, kv_heads, pages * PAGE, head_size]: what
    attention reads for one head lies together.

    `poison` fills pages with NaN when they are handed out, so that reading a row that never ran
    shows at once. `prefix_cache`: what free pages still hold; such pages are handed out last.
    """

    def __init__(
        self,
        shape: ModelConfig,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.prefix_cache = prefix_cache
        self.pages, self.poison = pages, poison
        self.device = device
        self._layers = [
            torch.empty(2, heads, pages * PAGE, size, dtype=dtype, device=device)
            for heads, size in map(shape.kv_at, range(shape.layers))
        ]
        self._users = np.zeros(pages, np.int64)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self.pages - int(np.count_nonzero(self._users))

    def keys(self, layer: int) -> Tensor:
        """Keys of a layer, [slots, kv_heads, head_size]."""
        return self._layers[layer][0].transpose(0, 1)

    def values(self, layer: int) -> Tensor:
        """Values of a layer, [slots, kv_heads, head_size]."""
        return self._layers[layer][1].transpose(0, 1)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, a contiguous run where there is one; None when there are not enough."""
        if self.free < count:
            return None
        free = self._blank()
        if self.prefix_cache and len(free) < count:
            free = np.union1d(free, self.prefix_cache.evict(self._idle, count - len(free)))
        if len(free) < count:
            return None
        return self._hand_out(_run(free, count) or free[:count].tolist())

    def allocate_contiguous(self, count: int, known: list[int]) -> list[int] | None:
        """`count` pages in a run, of which the first get what the `known` ones hold; None
        when there is no such run of pages that hold nothing.
        """
        chosen = _run(self._blank(), count)
        if chosen is None:
            return None
        self._hand_out(chosen)
        for layer in self._layers:
            pages = layer.view(*layer.shape[:2], self.pages, PAGE, layer.shape[3])
            pages[:, :, chosen[: len(known)]] = pages[:, :, known]
        return chosen

    def _blank(self) -> npt.NDArray[np.int64]:
        """Pages that nobody holds and that hold nothing, rising."""
        blank: npt.NDArray[np.bool_] = self._users == 0
        if self.prefix_cache:
            blank[list(self.prefix_cache.pages)] = False
        return blank.nonzero()[0]

    def _hand_out(self, chosen: list[int]) -> list[int]:
        for page in chosen:
            self._users[page] = 1
            for layer in self._layers if self.poison else ():
                layer[:, :, page * PAGE : (page + 1) * PAGE] = torch.nan
        return chosen

    def _idle(self, page: int) -> bool:
        return bool(self._users[page] == 0)

    def incref(self, pages: list[int]) -> None:
        """One more user of each page, which holds what it is wanted for."""
        for page in pages:
            self._users[page] += 1

    def free_pages(self, pages: list[int]) -> None:
        """One user less of each page; a page without users is free."""
        for page in pages:
            if self._users[page] < 1:
                raise RuntimeError(f"page {page} of the KV cache is freed twice")
            self._users[page] -= 1


def _run(free: npt.NDArray[np.int64], count: int) -> list[int] | None:
    """The first `count` of `free`, which rises, that follow one another."""
    if not 0 < count <= len(free):
        return None if count else []
    follow = free[count - 1 :] - free[: len(free) - count + 1] == count - 1
    start = int(follow.argmax())
    return free[start : start + count].tolist() if follow[start] else None


def page_bytes(shape: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return shape.stored * PAGE * dtype.itemsize
