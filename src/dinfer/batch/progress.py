"""How far a batch is, on standard error, and its figures at the end."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import Progress as Bar

from dinfer.batch.line import Result

EVERY = 10.0
"""Seconds between lines where standard error is no terminal."""


@dataclass
class Tally:
    """What a run did. skipped: lines an earlier run had answered; errors: lines whose answer is
    one; tokens: of answers.
    """

    lines: int
    skipped: int
    answered: int = 0
    errors: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    def add(self, found: Result) -> None:
        """Counts a result."""
        response = found["response"]
        if response is not None and response["status_code"] == 200:
            self.answered += 1
            self.tokens += response["body"]["usage"]["completion_tokens"]
        else:
            self.errors += 1

    @property
    def done(self) -> int:
        """Lines that have their result."""
        return self.skipped + self.answered + self.errors

    def figures(self) -> dict[str, float]:
        """For machines."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        return {
            "lines": self.lines,
            "skipped": self.skipped,
            "answered": self.answered,
            "errors": self.errors,
            "tokens": self.tokens,
            "seconds": seconds,
            "lines_per_second": (self.answered + self.errors) / seconds,
            "tokens_per_second": self.tokens / seconds,
        }

    def sentence(self) -> str:
        """For people."""
        rates = self.figures()
        return (
            f"{self.done:,} of {self.lines:,} lines, {self.errors:,} errors,"
            f" {rates['lines_per_second']:.1f} lines/s, {rates['tokens_per_second']:.0f} tokens/s"
        )


class Progress:
    """Counts what is written and shows it: a bar on a terminal, else a line now and then."""

    def __init__(self, tally: Tally, say: Callable[[str], None]) -> None:
        self.tally, self._say = tally, say
        console = Console(stderr=True)
        self._bar = Bar(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("batch", total=tally.lines, completed=tally.done)
        self._next = tally.began + EVERY

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def add(self, found: Sequence[Result]) -> None:
        """Counts results that were written."""
        for one in found:
            self.tally.add(one)
        text = self.tally.sentence()
        self._bar.update(self._task, completed=self.tally.done, description=text)
        if self._bar.disable and time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self._say(text)
