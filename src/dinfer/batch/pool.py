"""Calls spread over workers that may die."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from dinfer.batch.line import Reply
from dinfer.batch.run import Call, LineLost
from dinfer.errors import RequestError

TRIES_BESIDE_OTHERS = 2
TRIES_ALONE = 2
"""How often a line is given to a worker again. One that was there when two workers died may be why:
it then waits until no other such line runs, so that few lines are lost with it.
"""
STARTS = 3
"""How often in a row a worker may die before it can take a line."""


class WorkerDied(Exception):
    """The worker that had the call is gone, and the call with it."""


@dataclass(eq=False)
class _Worker:
    call: Call
    busy: int = 0


class Pool:
    """Workers, the least busy of which gets the next call; whoever dies is replaced.

    start: makes a worker that is ready, and gives the way to call it; that raises WorkerDied.
    """

    def __init__(self, start: Callable[[], Awaitable[Call]], count: int) -> None:
        self._start, self._count = start, count
        self._workers: list[_Worker] = []
        self._changed = asyncio.Event()
        self._alone = asyncio.Lock()
        self._starting: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def __aenter__(self) -> "Pool":
        for _ in range(self._count):
            self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)

    async def call(self, url: str, body: bytes) -> Reply:
        """The answer of a worker. Raises LineLost where each worker that had the call died, and
        what `start` raised where no worker can be started.
        """
        for _ in range(TRIES_BESIDE_OTHERS):
            with suppress(WorkerDied):
                return await self._try(url, body)
        async with self._alone:
            for _ in range(TRIES_ALONE):
                with suppress(WorkerDied):
                    return await self._try(url, body)
        tries = TRIES_BESIDE_OTHERS + TRIES_ALONE
        raise LineLost(f"{tries} workers died while they had this line.")

    async def _try(self, url: str, body: bytes) -> Reply:
        worker = await self._least_busy()
        worker.busy += 1
        try:
            return await worker.call(url, body)
        except WorkerDied:
            if worker in self._workers:
                self._workers.remove(worker)
                self._begin()
            raise
        finally:
            worker.busy -= 1

    async def _least_busy(self) -> _Worker:
        while not self._workers:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        return min(self._workers, key=lambda worker: worker.busy)

    def _begin(self) -> None:
        task = asyncio.create_task(self._add())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _add(self) -> None:
        try:
            self._workers.append(_Worker(await self._started()))
        except Exception as error:
            self._failure = error
        self._changed.set()

    async def _started(self) -> Call:
        for _ in range(STARTS):
            with suppress(WorkerDied):
                return await self._start()
        raise RequestError(f"A worker died {STARTS} times before it could take a request.")
