"""Workers for a batch: actors of Ray, each with an engine of its own.

Actors and not Ray Data, whose unit is a block of rows: a block of which one worker died is answered
anew in whole, a line that takes long holds up its block, and a job that is stopped begins again.
Here the unit is the line, and the process that reads and writes the files gives lines out.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from dinfer.batch.application import Application
from dinfer.batch.line import Reply
from dinfer.batch.pool import Pool, WorkerDied
from dinfer.batch.run import Call
from dinfer.cluster.connect import connected, engines_on_a_machine, share, with_kv_memory
from dinfer.engine.async_llm import AsyncLLM
from dinfer.errors import EngineError

AT_ONCE = 100_000
"""Calls in one worker; the window of the batch is what limits them."""


class Worker:
    """The actor."""

    async def load(self, name: str, source: str, options: dict[str, Any], neighbours: int) -> None:
        """Makes the engine; not in the constructor, whose errors lose their type on the way.
        neighbours: engines on the CPUs of this machine, 0 on a GPU.
        """
        if neighbours:
            options = with_kv_memory(options, neighbours)
        self._application = Application({name: AsyncLLM(source, **options)})

    async def call(self, url: str, body: bytes) -> Reply:
        """The answer of the server's application."""
        return await self._application.call(url, body)


@asynccontextmanager
async def engines(
    count: int, address: str | None, name: str, source: str, options: dict[str, Any]
) -> AsyncIterator[Call]:
    """So many engines on the Ray cluster at an address (None: see `connected`), and the way to call
    the one that has least to do. options: of AsyncLLM. Raises RequestError where there is no such
    cluster, or it has no room for them.
    """
    with connected(address) as ray:
        actor = share(ray, count, options["device"])
        neighbours = 0 if "num_gpus" in actor else engines_on_a_machine(ray, count)
        start = _starter(ray, actor, name, source, options, neighbours)
        async with Pool(start, count) as pool:
            yield pool.call


def _starter(
    ray: Any,
    actor: dict[str, float],
    name: str,
    source: str,
    options: dict[str, Any],
    neighbours: int,
) -> Callable[[], Awaitable[Call]]:
    """What makes workers. actor: options of the actor."""
    found = ray.exceptions
    deaths = (
        found.RayActorError,
        found.WorkerCrashedError,
        found.NodeDiedError,
        found.OutOfMemoryError,
    )
    make = ray.remote(**actor, max_restarts=0, max_concurrency=AT_ONCE)(Worker)

    async def start() -> Call:
        worker = make.remote()

        async def call(url: str, body: bytes) -> Reply:
            try:
                reply: Reply = await worker.call.remote(url, body)
            except deaths as error:
                raise WorkerDied from error
            except EngineError as error:  # nothing comes of this process any more
                ray.kill(worker)
                raise WorkerDied from error
            return reply

        try:
            await worker.load.remote(name, source, options, neighbours)
        except deaths as error:
            raise WorkerDied from error
        except found.RayTaskError as error:
            raise error.cause from error
        return call

    return start
