"""The input of a batch: JSONL or Parquet, read line by line, as often as wanted."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dinfer.batch.line import FIELDS, KEY_BYTES, Line, check, key_of, parse
from dinfer.errors import RequestError

MOST_BYTES = 64 * 2**20
"""Bytes of a line; a longer one is an error line, and is never held in memory whole."""
ROWS_AT_ONCE = 256
Keys = NDArray[np.bytes_]


def is_parquet(path: Path) -> bool:
    """Whether the name says so."""
    return path.suffix == ".parquet"


def parquet() -> Any:
    """The module pyarrow.parquet. Raises RequestError where it is not installed."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        text = "Parquet files need pyarrow; install the extra: pip install 'dinfer[parquet]'."
        raise RequestError(text) from error
    return pyarrow.parquet


class Source(ABC):
    """The lines of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise RequestError(f"There is no file {path}.")

    @abstractmethod
    def lines(self) -> Iterator[Line]:
        """All lines in order."""

    @abstractmethod
    def custom_ids(self) -> Iterator[str | None]:
        """The custom_id of each line, None where it has no valid one."""

    def keys(self) -> Keys:
        """The key of each line, in order: 16 bytes a line. Raises RequestError where two lines have
        the same custom_id.
        """
        found = bytearray()
        for number, custom_id in enumerate(self.custom_ids(), 1):
            found += key_of(custom_id, number)
        keys = as_keys(found)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        if len(same):
            first, second = sorted(int(order[same[0] + i]) for i in (0, 1))
            name = next(c for place, c in enumerate(self.custom_ids()) if place == first)
            raise RequestError(
                f"Lines {first + 1} and {second + 1} of {self.path} have the same custom_id"
                f" {name!r}; each line needs its own."
            )
        return keys


def as_keys(joined: bytes | bytearray) -> Keys:
    """Keys that were written one behind the other."""
    return np.frombuffer(bytes(joined), dtype=f"S{KEY_BYTES}")


class JsonLines(Source):
    """One JSON object a line; lines of nothing but spaces do not count."""

    def lines(self) -> Iterator[Line]:
        """All lines in order."""
        number = 0
        with self.path.open("rb") as file:
            while text := file.readline(MOST_BYTES):
                if not text.strip():
                    continue
                number += 1
                if len(text) == MOST_BYTES and not text.endswith(b"\n"):
                    while (rest := file.readline(MOST_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    yield Line(number, None, error=f"The line is longer than {MOST_BYTES} bytes.")
                else:
                    yield parse(number, text)

    def custom_ids(self) -> Iterator[str | None]:
        """The custom_id of each line."""
        return (line.custom_id for line in self.lines())


class ParquetRows(Source):
    """The columns custom_id, url, body and perhaps method. A body is a struct, whose nulls are left
    out, or a string of JSON.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns = self._check()

    def _check(self) -> list[str]:
        module = parquet()
        try:
            names = module.read_schema(self.path).names
        except (OSError, ValueError) as error:
            raise RequestError(f"{self.path} is no Parquet file: {error}.") from error
        if missing := [name for name in FIELDS if name not in names and name != "method"]:
            raise RequestError(f"{self.path} has no column {missing[0]!r}; it has {names}.")
        return [name for name in FIELDS if name in names]

    def _rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        with parquet().ParquetFile(self.path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                yield from batch.to_pylist()

    def lines(self) -> Iterator[Line]:
        """All rows in order."""
        for number, row in enumerate(self._rows(self._columns), 1):
            if isinstance(row["body"], str):
                try:
                    row["body"] = json.loads(row["body"])
                except (ValueError, RecursionError) as error:
                    custom_id = check(number, row).custom_id
                    text = f"body is not valid JSON: {error}."
                    yield Line(number, custom_id, error=text)
                    continue
            else:
                row["body"] = _without_nulls(row["body"])
            yield check(number, row)

    def custom_ids(self) -> Iterator[str | None]:
        """The custom_id of each row."""
        for row in self._rows(["custom_id"]):
            yield row["custom_id"] if isinstance(row["custom_id"], str) else None


def _without_nulls(value: Any) -> Any:
    """A struct of Arrow has every field of its type; those that are null were left out."""
    if isinstance(value, dict):
        return {name: _without_nulls(v) for name, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def source(path: Path) -> Source:
    """The reader for a file, by its name. Raises RequestError where it cannot be read."""
    return ParquetRows(path) if is_parquet(path) else JsonLines(path)
