"""Workers that die lose and double nothing."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dinfer.batch.line import Reply, check
from dinfer.batch.pool import STARTS, TRIES_ALONE, TRIES_BESIDE_OTHERS, Pool, WorkerDied
from dinfer.batch.run import Call, LineLost, answer
from dinfer.errors import CheckpointError, RequestError

from .conftest import asked, echo


class Fleet:
    """Workers without a process: `fatal` bodies, and sometimes chance, kill the one that has
    them with all its calls.
    """

    def __init__(self, chance: float = 0.0, seed: int = 0) -> None:
        self.random, self.chance = random.Random(seed), chance
        self.started = 0

    async def start(self) -> Call:
        self.started += 1
        await asyncio.sleep(0)
        dead = asyncio.Event()

        async def call(url: str, body: bytes) -> Reply:
            await asyncio.sleep(0)
            if json.loads(body).get("fatal") or self.random.random() < self.chance:
                dead.set()
            reply = await echo(url, body)
            if dead.is_set():
                raise WorkerDied
            return reply

        return call


def run(fleet: Fleet, lines: list[Any], workers: int, window: int) -> list[Any]:
    """Results of lines, in order."""
    found: list[Any] = []

    async def main() -> None:
        async with Pool(fleet.start, workers) as pool:
            checked = [check(number, line) for number, line in enumerate(lines, 1)]
            await answer(checked, pool.call, found.extend, window, in_order=True)

    asyncio.run(main())
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.integers(0, 10**6))
def test_workers_that_die_at_random(workers: int, window: int, seed: int) -> None:
    lines = [asked(f"c{i}", turns=i % 3) for i in range(60)]
    fleet = Fleet(0.02, seed)
    found = run(fleet, lines, workers, window)
    assert [line["custom_id"] for line in found] == [f"c{i}" for i in range(60)]
    for line, given_ in zip(found, lines, strict=True):
        if line["response"] is None:  # as unlikely as four deaths in a row
            assert line["error"]["code"] == "no_answer"
        else:
            assert line["response"]["body"]["echo"] == given_["body"]


def test_a_line_that_kills_is_given_up_and_takes_no_other_with_it() -> None:
    lines = [asked(f"c{i}", turns=i % 3, fatal=i == 7) for i in range(40)]
    fleet = Fleet()
    found = run(fleet, lines, 2, 16)
    assert [line["custom_id"] for line in found if line["response"] is None] == ["c7"]
    assert "4 workers died" in found[7]["error"]["message"]
    assert fleet.started == 2 + TRIES_BESIDE_OTHERS + TRIES_ALONE


def test_calls_go_to_the_least_busy() -> None:
    counts: list[int] = []

    async def start() -> Call:
        place = len(counts)
        counts.append(0)

        async def call(url: str, body: bytes) -> Reply:
            counts[place] += 1
            await asyncio.sleep(0.01)
            return Reply(200, "r", b"{}")

        return call

    async def main() -> None:
        async with Pool(start, 3) as pool:
            await pool.call("", b"")  # one is up; the others are in a moment
            await asyncio.gather(*(pool.call("", b"") for _ in range(9)))

    asyncio.run(main())
    assert sorted(counts) == [3, 3, 4]


async def _refuses() -> Call:
    raise CheckpointError("There is no such model.")


async def _dies() -> Call:
    raise WorkerDied


@pytest.mark.parametrize(
    ("start", "error", "said"),
    [
        (_refuses, CheckpointError, "no such model"),
        (_dies, RequestError, f"died {STARTS} times before"),
    ],
)
def test_workers_that_cannot_start(start: Callable, error: type[Exception], said: str) -> None:
    async def main() -> None:
        async with Pool(start, 2) as pool:
            with pytest.raises(error, match=said):
                await pool.call("", b"")

    asyncio.run(main())


def test_leaving_ends_what_still_starts() -> None:
    ended = False

    async def start() -> Call:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended = True
        raise AssertionError

    async def main() -> None:
        async with Pool(start, 1):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert ended


def test_a_lost_line_is_an_error_of_its_own() -> None:
    async def main() -> None:
        async with Pool(Fleet().start, 1) as pool:
            with pytest.raises(LineLost):
                await pool.call("/v1/completions", b'{"fatal": true}')
            reply = await pool.call("/v1/completions", b"{}")
            assert reply.status == 200

    asyncio.run(main())
