"""Runs a batch: a window of lines in flight, each result written once."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from dinfer.batch.line import Line, Reply, Result, failure, result
from dinfer.batch.results import Results, finish, finished_keys, journal
from dinfer.batch.source import Keys, Source, source
from dinfer.errors import RequestError

Call = Callable[[str, bytes], Awaitable[Reply]]
"""Answers a body that is posted to a URL."""
Write = Callable[[Sequence[Result]], None]


class LineLost(Exception):
    """A line that nobody could answer, though others go on; its text is the line's error."""


@dataclass
class Batch:
    """An input, its output, and which lines are still to be answered; leaving it as a context
    without an error says that all have their result.
    """

    source: Source
    out: Path
    in_order: bool
    results: Results | None
    is_done: NDArray[np.bool_]

    @classmethod
    def open(cls, given: Path, out: Path, in_order: bool = False) -> "Batch":
        """Looks through both files. Raises RequestError for two lines with one custom_id, for an
        output that belongs to another input, and with `in_order` for one that has another order.
        """
        if given.resolve() == out.resolve():
            raise RequestError(f"{out} is both input and output.")
        lines = source(given)
        keys = lines.keys()
        done = finished_keys(out)
        if done is not None:
            is_done = _matched(keys, done, given, out)
            if is_done.all():
                return cls(lines, out, in_order, None, is_done)
            raise RequestError(
                f"{out} has the results of {len(done)} lines, {given} has {len(keys)}; a finished"
                " Parquet file cannot grow: give another name, or remove it."
            )
        results = Results(journal(out))
        try:
            done = results.done()
            is_done = _matched(keys, done, given, out)
            if in_order and not np.array_equal(done, keys[: len(done)]):
                raise RequestError(f"The results in {out} are not in the order of {given}.")
        except BaseException:
            results.close()
            raise
        return cls(lines, out, in_order, results, is_done)

    def __enter__(self) -> "Batch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.results is not None:
            self.results.close()
            if error is None:
                finish(self.out)

    async def run(self, call: Call, window: int, show: Write) -> None:
        """Answers what has no result yet; `show` gets what was written."""
        results = self.results
        assert results is not None

        def write(found: Sequence[Result]) -> None:
            results.append(found)
            show(found)

        lines = zip(self.source.lines(), self.is_done, strict=True)
        await answer((line for line, done in lines if not done), call, write, window, self.in_order)


def _matched(keys: Keys, done: Keys, given: Path, out: Path) -> NDArray[np.bool_]:
    """For each key whether it is done."""
    if not np.isin(done, keys).all():
        raise RequestError(f"{out} has results of lines that {given} does not have.")
    if len(np.unique(done)) < len(done):
        raise RequestError(f"{out} has two results for one line.")
    return np.isin(keys, done)


async def answer(
    lines: Iterable[Line], call: Call, write: Write, window: int, in_order: bool = False
) -> None:
    """Answers lines, at most `window` of which are read and not written at any moment; `write` gets
    each result once, in_order: as the lines come.
    """
    places = asyncio.Semaphore(window)
    found: asyncio.Queue[tuple[int, Result] | None] = asyncio.Queue()

    async def one(place: int, line: Line) -> None:
        found.put_nowait((place, await _result(line, call)))

    try:
        async with asyncio.TaskGroup() as writing:
            writing.create_task(_write_all(found, write, places, in_order))
            async with asyncio.TaskGroup() as answering:
                for place, line in enumerate(lines):
                    await places.acquire()
                    answering.create_task(one(place, line))
            found.put_nowait(None)
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _result(line: Line, call: Call) -> Result:
    if line.error is not None:
        return failure(line, "invalid_line", line.error)
    try:
        body = json.dumps(line.body).encode()
    except RecursionError:
        return failure(line, "invalid_line", "body is nested too deeply.")
    try:
        return result(line, await call(line.url, body))
    except LineLost as error:
        return failure(line, "no_answer", str(error))


async def _write_all(
    found: asyncio.Queue[tuple[int, Result] | None],
    write: Write,
    places: asyncio.Semaphore,
    in_order: bool,
) -> None:
    """Writes what is there, all at once: while one sync of the disk runs, results gather."""
    held: dict[int, Result] = {}
    following = 0
    open_ = True
    while open_:
        items = [await found.get()]
        while not found.empty():
            items.append(found.get_nowait())
        open_ = None not in items
        held |= dict(item for item in items if item is not None)
        if in_order:
            ready = []
            while following in held:
                ready.append(held.pop(following))
                following += 1
        else:
            ready = list(held.values())
            held.clear()
        if ready:
            await asyncio.to_thread(write, ready)
        for _ in ready:
            places.release()
