"""Keeps texts of others from becoming special tokens inside a chat template.

A template is a program: it trims contents, splits them at `</think>`, writes them as JSON. So they
are not encoded apart, but marked: where one holds the text of a special token, a character that
occurs nowhere else is put into it before the template sees it. What the template gives is then
cut at the real special tokens, and what lies between them with the mark in it is plain text.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dinfer.text.tokenizer import Tokenizer

_FIRST, _COUNT = 0xF0000, 0xFFFD
"""Plane 15, for private use: no letter, no digit, and changed by no normalization."""


class Guard:
    """Marks the texts in messages, tools and other variables of a template."""

    def __init__(self, tokenizer: Tokenizer, known: Iterable[str]) -> None:
        """known: all texts that the template will see, and its own."""
        self._tokenizer = tokenizer
        seen = set().union(*known)
        # Drawn at random: nobody can leave few of them.
        draw = iter(lambda: chr(_FIRST + secrets.randbelow(_COUNT)), None)
        self.mark = next(letter for letter in draw if letter not in seen)
        """The character; what `Tokenizer.encode_marked` takes."""

    def __call__(self, value: Any) -> Any:
        """The value, with marks in its texts; other values are left alone."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self(key): self(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self(each) for each in value]
        return value

    def _marked(self, text: str) -> str:
        places = sorted(self._tokenizer.special_places(text))
        parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        return self.mark.join(parts)


def texts_in(value: Any) -> Iterator[str]:
    """All texts in messages, tools and the like."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from texts_in(key)
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)
