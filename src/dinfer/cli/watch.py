"""Draws a canvas that fills in."""

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dinfer.request import CanvasEvent, TextEvent
from dinfer.text.tokenizer import Tokenizer

SHADES = ((0.5, "bold red"), (0.8, "bold yellow"), (0.95, "bold green"))


def shade(confidence: float) -> str:
    """Colour of a token by its confidence."""
    return next((style for limit, style in SHADES if confidence < limit), "bold cyan")


class Watcher:
    """A live view of one answer: masks as dots, new tokens coloured by confidence, older ones
    plain.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer, length: int) -> None:
        self._tokenizer, self._length = tokenizer, length
        self._tokens: dict[int, tuple[int, float]] = {}
        self._fresh: set[int] = set()
        self._live = Live(console=console, refresh_per_second=30, transient=True)

    def __enter__(self) -> "Watcher":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def __call__(self, event: CanvasEvent | TextEvent) -> None:
        """Takes an event of the answer."""
        if isinstance(event, TextEvent):
            return
        for place, token, confidence in zip(
            event.positions, event.token_ids, event.confidence, strict=True
        ):
            self._tokens[place] = (token, confidence)
        for place in event.back:
            self._tokens.pop(place, None)
        self._fresh = set(event.positions)
        self._live.update(self._draw(event.step), refresh=True)

    def _draw(self, step: int) -> Text:
        drawn = Text()
        for place in range(self._length):
            if place not in self._tokens:
                drawn.append("·", style="dim")
                continue
            token, confidence = self._tokens[place]
            piece = self._tokenizer.decode([token], skip_special=True)
            drawn.append(piece, style=shade(confidence) if place in self._fresh else "")
        drawn.append(f"\n\nforward {step}, {len(self._tokens)} tokens set", style="dim")
        return drawn
