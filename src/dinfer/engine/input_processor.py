"""From what a caller gives (text, ids, messages, text with holes) to requests."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dinfer.errors import ContextLengthError, RequestError
from dinfer.loader.load import Loaded
from dinfer.request import Request, SamplingParams
from dinfer.text.chat import check_messages
from dinfer.text.guard import texts_in
from dinfer.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
_BLANK = re.compile(r"\[BLANK(?::([0-9]{1,9}))?\]")


@dataclass(frozen=True)
class Holes:
    """A text with holes: its fixed pieces, and the number of tokens of the hole after each but the
    last.
    """

    pieces: list[str]
    sizes: list[int]


class InputProcessor:
    """Makes the requests of one loaded model; every request gets an id of its own."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError where it has none."""
        if self._loaded.tokenizer is None:
            raise RequestError(
                f"The model {self._loaded.name!r} brings no tokenizer; give token ids, not text."
            )
        return self._loaded.tokenizer

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Text that looks like a special token stays text."""
        if isinstance(prompt, str):
            if self._loaded.facts.chat_only:
                return self.chat([{"role": "user", "content": prompt}])
            return self.encode(prompt)
        given: Any = prompt
        if not isinstance(given, Sequence) or any(type(t) is not int for t in given):
            raise RequestError("A prompt must be a string or a list of whole numbers (token ids).")
        return list(given)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text. Raises ContextLengthError for a text that cannot fit, before
        it is encoded: that takes seconds for a megabyte.
        """
        self._check_size([text])
        return self.tokenizer.encode(text)

    def _check_size(self, texts: Sequence[str]) -> None:
        """Refuses texts of more bytes than the context can hold. Unicode normalization may shorten
        a text before it is split (NFC: to a third).
        """
        context = self._loaded.facts.context
        most = 4 * context * self.tokenizer.longest_token
        characters = sum(map(len, texts))
        if characters > most:
            raise ContextLengthError(
                f"The text has {characters} characters; the context of this model is {context}"
                f" tokens, at most {most} characters."
            )

    def chat(self, messages: Any, **variables: Any) -> list[int]:
        """Token ids of a conversation, rendered with the model's own template, ready for the
        answer.
        """
        if self._loaded.template is None:
            raise RequestError(
                f"The model {self._loaded.name!r} brings no chat template; use generate."
            )
        check_messages(messages)
        self._check_size([*texts_in(messages), *texts_in(variables)])
        return self._loaded.template.encode(self.tokenizer, messages, **variables)

    def complete(
        self, prompt: Prompt, params: SamplingParams, suffix: Prompt | None = None
    ) -> list[Request]:
        """`params.n` requests: the prompt, max_tokens blanks, and fixed text after them if there
        is a suffix.
        """
        if params.stop and self._loaded.tokenizer is None:
            raise RequestError(
                f"The model {self._loaded.name!r} brings no tokenizer, so stop strings cannot be"
                " found; leave stop empty."
            )
        head, tail = self.ids(prompt), self._fixed(suffix) if suffix is not None else []
        self._fits(len(head) + len(tail), params.max_tokens)
        canvas = (*head, *[None] * params.max_tokens, *tail)
        forbidden = frozenset() if suffix is None else self._special()
        first = self._request(canvas, len(head), params, suffix is None, forbidden)
        return self.copies(first)

    def copies(self, request: Request) -> list[Request]:
        """The request as often as its `n` says, each with an id and a seed of its own; the first
        is itself.
        """
        others = range(1, request.params.n)
        return [
            request,
            *(replace(request, id=self._id(), seed=_apart(request, i)) for i in others),
        ]

    def holes(self, text: str) -> Holes:
        """Splits a text at its `[BLANK:n]` marks (n tokens each)."""
        parts = _BLANK.split(text)  # piece, number, piece, number, ..., piece
        sizes = [int(number or 0) for number in parts[1::2]]
        if not sizes or min(sizes) < 1:
            raise RequestError(
                "The text for infilling needs a hole, [BLANK:n] with n of 1 or more tokens."
            )
        return Holes(parts[::2], sizes)

    def infill(self, holes: Holes, params: SamplingParams, prompt: Prompt = ()) -> Request:
        """One request whose fixed pieces stay as they are; special tokens cannot be chosen."""
        head = self.ids(prompt) if prompt else []
        first, *pieces = [self.encode(piece) for piece in holes.pieces]
        self._fits(len(head) + len(first) + sum(map(len, pieces)), sum(holes.sizes))
        canvas: list[int | None] = [*head, *first]
        for size, piece in zip(holes.sizes, pieces, strict=True):
            canvas += [None] * size + piece  # type: ignore[operator]
        return self._request(tuple(canvas), len(head), params, False, self._special())

    def pinned(
        self, pins: Mapping[int, Prompt], params: SamplingParams, prompt: Prompt = ()
    ) -> Request:
        """One request of max_tokens positions, with fixed text or ids from each position of `pins`
        on (counted from the answer's start); the rest is found.
        """
        head = self.ids(prompt) if prompt else []
        self._fits(len(head), params.max_tokens)
        answer: list[int | None] = [None] * params.max_tokens
        for start, given in pins.items():
            for place, token in enumerate(self._fixed(given), start):
                if not 0 <= place < len(answer):
                    raise RequestError(
                        f"The text pinned to position {start} reaches position {place}; the"
                        f" positions go from 0 to {len(answer) - 1} (max_tokens is {len(answer)})."
                    )
                if answer[place] is not None:
                    raise RequestError(f"Position {place} is pinned twice.")
                answer[place] = token
        return self._request((*head, *answer), len(head), params, False, self._special())

    def _fixed(self, text: Prompt) -> list[int]:
        return self.encode(text) if isinstance(text, str) else self.ids(text)

    def _special(self) -> frozenset[int]:
        known = self._loaded.tokenizer.special_ids if self._loaded.tokenizer else frozenset()
        vocab = self._loaded.model.shape.vocab  # a tokenizer may know more ids than the model
        return frozenset(t for t in known | self._loaded.facts.eos_ids if 0 <= t < vocab)

    def _fits(self, fixed: int, blanks: int) -> None:
        """Refuses what is longer than the context before a canvas of that length is made."""
        context = self._loaded.facts.context
        if fixed + blanks > context:
            raise ContextLengthError.of(fixed, blanks, context)

    def _request(
        self,
        canvas: tuple[int | None, ...],
        answer: int,
        params: SamplingParams,
        stops: bool,
        forbidden: frozenset[int],
    ) -> Request:
        seed = params.seed % 2**63
        return Request(self._id(), canvas, answer, params, stops, seed, forbidden)

    def _id(self) -> str:
        return f"r{next(self._ids)}"


def _apart(request: Request, number: int) -> int:
    """Answers of one prompt need seeds of their own; the first keeps the caller's."""
    return (request.params.seed + number * 0x9E3779B97F4A7C15) % 2**63
