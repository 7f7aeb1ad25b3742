"""The output of a batch: whole lines, appended and synced, so that a run may be killed whenever."""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from dinfer.batch.line import Result, key_of_result
from dinfer.batch.source import ROWS_AT_ONCE, Keys, as_keys, is_parquet, parquet
from dinfer.errors import RequestError

COLUMNS = ("id", "custom_id", "status_code", "request_id", "body", "error")
_CHUNK = 2**16


class Results:
    """A JSONL file of results that belongs to this process alone until it is closed.

    What an earlier run left behind stays, but for a last line that was not written to its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise RequestError(f"{path} is no file that can be appended to.")
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error}.") from error
        self._lock = threading.Lock()
        try:
            _own(self._file, path)
            _cut_torn_line(self._file)
        except BaseException:
            self._file.close()
            raise

    def done(self) -> Keys:
        """The keys of the lines that have their result, in the file's order. Raises RequestError
        where a line is no result.
        """
        found = bytearray()
        with self.path.open("rb") as file:
            for number, text in enumerate(file, 1):
                try:
                    found += key_of_result(json.loads(text))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    said = f"Line {number} of {self.path} is not the result of a batch."
                    raise RequestError(said) from error
        return as_keys(found)

    def append(self, found: Sequence[Result]) -> None:
        """Writes results; when this returns they are on the disk. Raises RequestError where it is
        full.
        """
        view = memoryview(b"".join(json.dumps(one).encode() + b"\n" for one in found))
        try:
            with self._lock:
                while view:
                    view = view[self._file.write(view) :]
                os.fsync(self._file.fileno())
        except OSError as error:
            raise RequestError(f"{self.path} cannot be written: {error}.") from error

    def close(self) -> None:
        """Lets other runs have the file."""
        with self._lock:  # a write that was begun comes to its end
            self._file.close()


def _own(file: IO[bytes], path: Path) -> None:
    """Keeps a second run from writing the same lines. Lasts until the file is closed."""
    try:
        import fcntl  # not on Windows
    except ModuleNotFoundError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise RequestError(f"{path} is being written by another run.") from error


def _cut_torn_line(file: IO[bytes]) -> None:
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _CHUNK)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            file.truncate(start + place + 1)
            return
        end = start
    file.truncate(0)


def journal(out: Path) -> Path:
    """Where results are kept until all are there: a Parquet file cannot be appended to."""
    return out.with_name(out.name + ".partial.jsonl") if is_parquet(out) else out


def finished_keys(out: Path) -> Keys | None:
    """The keys of a Parquet file of results that was finished, None where there is none."""
    if not is_parquet(out) or not out.exists() or journal(out).exists():
        return None
    found = bytearray()
    try:
        with parquet().ParquetFile(out) as file:
            for batch in file.iter_batches(columns=["id", "custom_id"]):
                for row in batch.to_pylist():
                    found += key_of_result(row | {"response": None, "error": None})
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(f"{out} is not the result of a batch: {error}.") from error
    return as_keys(found)


def finish(out: Path) -> None:
    """Makes the Parquet file from the journal, in one piece or not at all."""
    if not is_parquet(out):
        return
    import pyarrow

    kept, made = journal(out), out.with_name(out.name + ".new")
    text = pyarrow.string()
    schema = pyarrow.schema(
        [(name, pyarrow.int32() if name == "status_code" else text) for name in COLUMNS]
    )
    with parquet().ParquetWriter(made, schema) as writer:
        for rows in _in_groups(kept):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema))
    os.replace(made, out)
    kept.unlink()


def _in_groups(kept: Path) -> Iterator[list[dict[str, Any]]]:
    rows = []
    with kept.open("rb") as file:
        for line in file:
            rows.append(_row(json.loads(line)))
            if len(rows) == ROWS_AT_ONCE:
                yield rows
                rows = []
    if rows:
        yield rows


def _row(found: Result) -> dict[str, Any]:
    """A result as a row: bodies and errors are JSON, since their fields differ."""
    response, error = found["response"], found["error"]
    row = {"id": found["id"], "custom_id": found["custom_id"]}
    if response is not None:
        row |= {name: response[name] for name in ("status_code", "request_id")}
        row["body"] = json.dumps(response["body"])
    return row | {"error": None if error is None else json.dumps(error)}
