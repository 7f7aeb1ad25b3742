"""The text of one answer as it settles: cut at stop strings, never half a character."""

from collections.abc import Sequence

from dinfer.text.tokenizer import Detokenizer, Tokenizer


class OutputProcessor:
    """Collects settled tokens; `feed` gives the text that now surely belongs to the answer."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped = False

    def feed(self, ids: Sequence[int], last: bool = False) -> str:
        """Adds settled ids; `last` gives out all that is left. After a stop string nothing more
        comes.
        """
        if self.stopped or self._detokenizer is None:
            return ""
        self._held += self._detokenizer.add(ids)
        if last:
            self._held += self._detokenizer.finish()
        found = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
        keep = min(found) if found else len(self._held) - (0 if last else self._maybe())
        given, self._held = self._held[:keep], self._held[keep:]
        self.stopped = bool(found)
        self.text += given
        return given

    def _maybe(self) -> int:
        """Length of the longest tail that may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        tails = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in tails if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)
