"""Text to token ids and back, and the text of an answer that settles piece by piece.

Two tokenizers are built from one file: the full one, and a plain one without the added tokens, so
that text which only looks like a control token ("<|mask|>") can be encoded as the text it is.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from dinfer.errors import CheckpointError, RequestError

# Qwen2's published pre-tokenizer pattern; Dream's slow tokenizer has the same one.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern that texts are split by before the merges."""
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""How an added token is matched, unless told otherwise."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\ufffd"
_LONG_ENOUGH, _LONGEST_WINDOW = 16, 32
_LONG_TEXT = 4096

Json = dict[str, Any]


class Tokenizer:
    """The tokenizer of a checkpoint. It never adds a beginning or end token by itself."""

    def __init__(
        self, full: tokenizers.Tokenizer, plain: tokenizers.Tokenizer, byte_fallback: bool = False
    ) -> None:
        """`plain` is `full` without its added tokens; `load` makes both."""
        self._full, self._plain = full, plain
        added = full.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that `decode` leaves out: the added tokens that are marked special."""
        self.vocab_size: int = full.get_vocab_size(with_added_tokens=True)
        """Number of tokens, added ones included."""
        self.byte_fallback = byte_fallback
        """Whether the decoder joins pieces like "<0xE4>" to characters."""
        self._added_ids = frozenset(added)
        self._texts: dict[int, bool] = {}  # what `is_text` found out: the library takes its time
        self._words = tuple(token.content for token in added.values())
        self._heads, self._tails = _heads(self._words), _tails(self._words)
        special = [token for token in added.values() if token.special and len(token.content) > 1]
        self._special_words = tuple(token.content for token in special)
        self._special_heads = _heads(self._special_words)
        self._special_tails = _tails(self._special_words)
        self._special_in_other_forms = any(token.normalized for token in special)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads `tokenizer.json`, or else `vocab.json` + `merges.txt`, from a checkpoint's folder.

        Raises CheckpointError where neither is there or a file is damaged.
        """
        source = _source(folder)
        try:
            document = _document(source)
            added = _added_tokens(folder, document)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file may lack anything
            raise _unusable(str(source), error) from error
        return cls.of(document, added, str(source))

    @classmethod
    def of(cls, document: Json, added: list[Json], source: str) -> "Tokenizer":
        """From what a tokenizer.json holds, and its added tokens in the order of their ids; source:
        what errors call it. Raises CheckpointError for what is no tokenizer.
        """
        try:
            full = _build(document, document["model"], added)
            plain = _build(document, _without(document["model"], added), [])
        except Exception as error:  # the tokenizers library raises plain Exception for bad content
            raise _unusable(source, error) from error
        for token in added:
            found = full.token_to_id(token["content"])
            if found != token["id"]:
                raise CheckpointError(
                    f"{source} gives the added token {token['content']!r} the id {token['id']}, "
                    f"but its place in the vocabulary is {found}."
                )
        return cls(full, plain, "ByteFallback" in json.dumps(document.get("decoder")))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text. Only with `special` does the text of an added token become that token.

        Raises RequestError where the text is not valid Unicode (half a surrogate pair).
        """
        _refuse_surrogates(text)
        chosen = self._full if special else self._plain
        if len(text) < _LONG_TEXT:
            ids: list[int] = chosen.encode(text, add_special_tokens=False).ids
            return ids
        # Unlike `encode`, a batch lets other threads run meanwhile: a long text takes seconds.
        batch: list[int] = chosen.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return batch

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of a text with added tokens; what lies between two of them is read without them, and
        without the character `mark`, if it holds that. Raises RequestError as `encode` does.
        """
        if mark not in text:
            return self.encode(text, special=True)
        _refuse_surrogates(text)
        found = self._full.encode_batch([text], add_special_tokens=False)[0]
        added = [place for place, id in enumerate(found.ids) if id in self._added_ids]
        ids: list[int] = []
        first, start = 0, 0
        for place in (*added, len(found.ids)):
            low, high = found.offsets[place] if place < len(found.ids) else (len(text), len(text))
            piece = text[start:low]
            ids += self.encode(piece.replace(mark, "")) if mark in piece else found.ids[first:place]
            ids += found.ids[place : place + 1]
            first, start = place + 1, high
        return ids

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token's name in UTF-8, which is at least as long as its text."""
        return max((len(token.encode()) for token in self._full.get_vocab()), default=1)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; special tokens are left out unless told otherwise, unknown ids always."""
        return self._full.decode(list(ids), skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        """Id of a token by its name in the vocabulary, None where there is no such token."""
        return self._full.token_to_id(token)

    def token_of(self, id: int) -> str | None:
        """Name of a token in the vocabulary, None where the id is not in use."""
        return self._full.id_to_token(id) if 0 <= id < 1 << 32 else None

    def is_text(self, id: int) -> bool:
        """Whether the id is in use, and for no special token."""
        known = self._texts.get(id)
        if known is None:
            known = self.token_of(id) is not None and id not in self.special_ids
            self._texts[id] = known
        return known

    def special_places(self, text: str) -> set[int]:
        """Places inside a text, or at its ends, where any character keeps a special token of two
        characters or more from being read: in each that it holds, and where a part of one at an
        end of the text (spaces aside) could be completed by what it is put next to.
        """
        places = set()
        for word in self._special_words:
            start = text.find(word)
            while start >= 0:
                places.add(start + 1)
                start = text.find(word, start + 1)
        start, stop = len(text) - len(text.lstrip()), len(text.rstrip())
        if text.startswith(self._special_tails, start):
            places.add(start)
        if text.endswith(self._special_heads, 0, stop):
            places.add(stop)
        if self._special_in_other_forms and text:
            found = self._full.encode_batch([text], add_special_tokens=False)[0]
            spans = zip(found.ids, found.offsets, strict=True)
            places |= {low + 1 for id, (low, high) in spans if id in self.special_ids}
        return places

    def touches_added(self, text: str) -> bool:
        """Whether the text holds an added token, or a part of one at an edge.

        Such a part could be completed by the text that it is put next to.
        """
        if text.startswith(self._tails) or text.endswith(self._heads):
            return True
        if any(word in text for word in self._words):
            return True
        # Some added tokens are matched in the normalised text, which only the library knows.
        return not self._added_ids.isdisjoint(self.encode(text, special=True))


class Detokenizer:
    """The text of a growing answer, given out as soon as no further token can change it.

    The pieces joined are `tokenizer.decode(all ids)`. Only a window of the last ids is decoded: a
    few ids whose text is given already, since a decoder may treat the first token otherwise
    (strip its space), and the ids after them. The same method is known from TGI and vLLM.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts with no ids."""
        self._tokenizer = tokenizer
        self._reset()

    def _reset(self) -> None:
        self._window: list[int] = []
        self._clean = 0  # ids at the start of the window that end with a whole character
        self._given = 0  # characters of the window's text that were given out

    def add(self, ids: Sequence[int]) -> str:
        """Takes further ids; gives the text that became settled, never half a character."""
        self._window += filter(self._tokenizer.is_text, ids)
        end = len(self._window) - self._open_bytes()
        text = self._tokenizer.decode(self._window[:end])
        # An unfinished character at the end is one U+FFFD, whatever number of its bytes is there.
        settled = text.removesuffix(_BROKEN)
        piece = settled[self._given :]
        self._given = max(self._given, len(settled))
        if settled == text and end > _LONG_ENOUGH:
            self._move(end)
        elif settled != text and end > _LONGEST_WINDOW:
            self._cut(end, text)
        return piece

    def finish(self) -> str:
        """Gives the rest, be it half a character, and starts anew."""
        rest = self._tokenizer.decode(self._window)[self._given :]
        self._reset()
        return rest

    def _open_bytes(self) -> int:
        """Length of the run of byte pieces at the end: one bad byte later spoils the whole run."""
        count = 0
        if self._tokenizer.byte_fallback:
            for id in reversed(self._window):
                if not _BYTE_PIECE.fullmatch(self._tokenizer.token_of(id) or ""):
                    break
                count += 1
        return count

    def _move(self, end: int) -> None:
        """Lets the window begin at the last clean place; `end` is the new one."""
        context = self._tokenizer.decode(self._window[self._clean : end])
        if context:  # without any text before it, the next token would be decoded as a first one
            self._window = self._window[self._clean :]
            self._clean, self._given = end - self._clean, len(context)

    def _cut(self, end: int, text: str) -> None:
        """Shortens a window that never became clean (endless broken bytes, real U+FFFD).

        A cut inside a character would show: its bytes decode otherwise when apart. Eight ids are
        more bytes than a character has, so that what holds now holds for all further ids.
        """
        for place in range(end - 8, end - 16, -1):
            head = self._tokenizer.decode(self._window[:place])
            tail = self._tokenizer.decode(self._window[place:end])
            if tail and head + tail == text:
                self._window = self._window[place:]
                self._clean, self._given = 0, self._given - len(head)
                return


def read_json(path: Path) -> Json:
    """The object in a JSON file, empty where there is no such file.

    Raises CheckpointError where the file holds anything else.
    """
    try:
        refuse_pointer(path)
        found = json.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(found).__name__}.")
    return found


def refuse_pointer(path: Path) -> None:
    """Raises CheckpointError where a file is what Git LFS leaves in the place of a large one."""
    start = b"version https://git-lfs.github.com/spec/"
    with path.open("rb") as file:
        if file.read(len(start)) == start:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its"
                " folder, or download the file."
            )


def special_tokens(folder: Path) -> dict[str, str | list[str]]:
    """The named special tokens of a folder, such as `eos_token`, as Hugging Face's files give them.

    `additional_special_tokens` is a list; names without a value are left out. transformers 5 calls
    that list `extra_special_tokens`, or has there a table of names of the model's own, such as
    `image_token`, which may stand beside the others as well.
    """
    merged = read_json(folder / "special_tokens_map.json")
    merged |= read_json(folder / "tokenizer_config.json")
    extra = merged.get("extra_special_tokens")
    merged |= extra if isinstance(extra, dict) else {}
    named = {name: _content(value) for name, value in merged.items() if name.endswith("_token")}
    found: dict[str, str | list[str]] = {name: text for name, text in named.items() if text}
    more = merged.get("additional_special_tokens") or extra
    if isinstance(more, list):
        found["additional_special_tokens"] = [text for text in map(_content, more) if text]
    return found


def _heads(words: Sequence[str]) -> tuple[str, ...]:
    return tuple({word[:end] for word in words for end in range(1, len(word))})


def _tails(words: Sequence[str]) -> tuple[str, ...]:
    return tuple({word[start:] for word in words for start in range(1, len(word))})


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text holds half a surrogate pair at character {error.start}; "
            "only valid Unicode can be encoded."
        ) from error


def _content(value: Any) -> str | None:
    """The text of a token that is written as a string or as an object with "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _unusable(source: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{source} is not a usable tokenizer ({type(error).__name__}: {error}).")


def _source(folder: Path) -> Path:
    """The file that a folder's tokenizer is read from."""
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return folder / "vocab.json"
    raise CheckpointError(
        f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt."
    )


def _document(source: Path) -> Json:
    """What a tokenizer.json holds, or would hold for a vocabulary with merges."""
    found = read_json(source)
    if source.name == "tokenizer.json":
        if not isinstance(found.get("model"), dict):
            raise CheckpointError(f"{source} is not a tokenizer: it has no model.")
        return found | {"truncation": None, "padding": None}
    lines = source.with_name("merges.txt").read_text("utf-8-sig").split("\n")
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    config = read_json(source.with_name("tokenizer_config.json"))
    gpt2 = str(config.get("tokenizer_class", "")).startswith("GPT2")
    space = bool(config.get("add_prefix_space", False))
    document = byte_level(None if gpt2 else QWEN2_WORDS, not gpt2, space)
    document["model"] |= {"vocab": found, "merges": merges}
    return document


def byte_level(
    words: str | None, nfc: bool = False, space: bool = False, digits: bool = False
) -> Json:
    """A byte-level BPE without a vocabulary. words: the pattern that texts are split by; None =
    GPT-2's. nfc: composes characters first. space: puts one before a text. digits: each stands
    alone, whatever the pattern says.
    """
    frame = tokenizers.Tokenizer(models.BPE())
    frame.decoder = decoders.ByteLevel()
    if words is None:
        frame.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        frame.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    if digits:
        single = pre_tokenizers.Digits(individual_digits=True)
        frame.pre_tokenizer = pre_tokenizers.Sequence([single, frame.pre_tokenizer])
    if nfc:
        frame.normalizer = normalizers.NFC()
    document: Json = json.loads(frame.to_str())
    return document


def _added_tokens(folder: Path, document: Json) -> list[Json]:
    """All added tokens in the order of their ids, from every file that may name some.

    The flags of tokenizer_config.json win over those of tokenizer.json, as in transformers.
    """
    found = {token["content"]: FLAGS | token for token in document.get("added_tokens") or []}
    config = read_json(folder / "tokenizer_config.json")
    for id, token in (config.get("added_tokens_decoder") or {}).items():
        old = found.get(token["content"], FLAGS | {"id": int(id), "special": False})
        found[token["content"]] = old | {k: token[k] for k in (*FLAGS, "special") if k in token}
    if not (folder / "tokenizer.json").is_file():
        for text, id in read_json(folder / "added_tokens.json").items():
            found.setdefault(text, FLAGS | {"id": id, "content": text, "special": False})
    vocab = _vocabulary(document["model"])
    for value in special_tokens(folder).values():
        for text in [value] if isinstance(value, str) else value:
            if text in vocab:
                found.setdefault(text, FLAGS | {"id": vocab[text]})
            if text in found:
                found[text]["special"] = True
    return sorted(
        (token | {"content": text} for text, token in found.items()), key=lambda token: token["id"]
    )


def _vocabulary(model: Json) -> dict[str, int]:
    """Token names and ids of a model; a unigram model has a list of (name, score)."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {piece: id for id, (piece, _) in enumerate(vocab)}


def _without(model: Json, added: list[Json]) -> Json:
    """The model so that it cannot produce a special token which stands in its own vocabulary.

    One character alone is kept: it may be a letter of the alphabet; so is the unknown token.
    """
    vocab = model["vocab"]
    gone = {token["content"] for token in added if token["special"] and len(token["content"]) > 1}
    gone &= _vocabulary(model).keys() - {model.get("unk_token")}
    if not gone:
        return model
    if not isinstance(vocab, dict):  # a unigram id is a place in the list, so it stays occupied
        unknown = model.get("unk_id")
        names = [piece if i == unknown else f"\0{i}" for i, (piece, _) in enumerate(vocab)]
        kept = [[n if p in gone else p, s] for n, (p, s) in zip(names, vocab, strict=True)]
        return model | {"vocab": kept}
    changed = model | {"vocab": {name: id for name, id in vocab.items() if name not in gone}}
    if "merges" in model:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        changed["merges"] = [m for m in pairs if gone.isdisjoint((*m, "".join(m)))]
    return changed


def _build(document: Json, model: Json, added: list[Json]) -> tokenizers.Tokenizer:
    text = json.dumps(document | {"model": model, "added_tokens": added})
    return tokenizers.Tokenizer.from_str(text)
