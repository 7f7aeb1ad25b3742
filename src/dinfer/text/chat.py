"""Conversations to token ids, with the chat template that a checkpoint brings."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dinfer.errors import CheckpointError, RequestError
from dinfer.text.tokenizer import Tokenizer, read_json, special_tokens

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages as the model was trained to see them, in a sandbox, as Hugging Face does."""

    def __init__(self, source: str, constants: Mapping[str, Any] | None = None) -> None:
        """`source` is a Jinja template; `constants` are its named tokens, such as `eos_token`.

        Raises CheckpointError where the source is no valid template.
        """
        self._source, self._constants = source, dict(constants or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"The chat template is not valid Jinja: {error}.") from error

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a checkpoint's folder, None where it brings none.

        Raises CheckpointError where a file is damaged.
        """
        file = folder / "chat_template.jinja"
        source = read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry for entry in source if isinstance(entry, dict)}
            source = named.get("default", {}).get("template")
        try:
            source = file.read_text("utf-8-sig") if file.is_file() else source
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
        return cls(source, special_tokens(folder)) if isinstance(source, str) else None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation. `variables` go to the template (`enable_thinking`, `tools`).

        Raises RequestError for messages of the wrong shape and where the template refuses them.
        """
        check_messages(messages)
        known = {"tools": None, "documents": None} | self._constants | variables
        known |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(known)
        except RequestError:
            raise
        except Exception as error:  # a template is a program of others: it may fail in any way
            raise RequestError(
                f"The chat template cannot render these messages: {error}."
            ) from error

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation; a special token never comes from a message's content.

        Where no content could form one, this is the official tokenisation of the whole text. Else
        template and contents are encoded apart. `variables` and further fields of a message are
        trusted. Raises RequestError as `render` does, and for a role with the text of such a token.
        """
        whole = self.render(messages, add_generation_prompt, **variables)
        self._check_roles(tokenizer, messages)
        contents = [message["content"] for message in messages]
        if not any(map(tokenizer.touches_added, _edges(contents))):
            return tokenizer.encode(whole, special=True)
        mark = _mark((self._source, whole, *contents))
        slots = [{**m, "content": f"{mark}{i}x"} for i, m in enumerate(messages)]
        framed = self.render(slots, add_generation_prompt, **variables)
        # Even places are the template's text, odd ones the numbers of messages.
        parts = re.split(f"{mark}([0-9]+)x", framed)
        chosen = _as_rendered(parts, contents, whole)
        ids: list[int] = []
        for place, part in enumerate(parts):
            inside = place % 2 == 1
            ids += tokenizer.encode(chosen[int(part)] if inside else part, special=not inside)
        return ids

    def end_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids that end an answer: the named `eos_token`, and the special token that the template
        puts behind an assistant's message.
        """
        found = {tokenizer.id_of(str(self._constants.get("eos_token")))}
        mark = _mark((self._source,))
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        try:
            behind = self.render(messages, add_generation_prompt=False).partition(mark)[2]
        except RequestError:  # it asks for more than two plain messages
            behind = ""
        found |= set(tokenizer.encode(behind.lstrip(), special=True)[:1]) & tokenizer.special_ids
        return frozenset(id for id in found if id is not None)

    def _check_roles(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
        """A role is compared by the template, so it cannot be encoded apart as contents are."""
        for role in {message["role"] for message in messages}:
            if role not in self._source and tokenizer.touches_added(role):
                raise RequestError(f"The role {role!r} holds text of a special token.")


def check_messages(messages: Any) -> None:
    """Raises RequestError unless each message is an object with strings for role and content."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("Messages must be a list with at least one message.")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"Message {place} must be an object with role and content.")
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"Message {place} has no {key}.")
            if not isinstance(message[key], str):
                kind = type(message[key]).__name__
                raise RequestError(f"The {key} of message {place} must be a string, not {kind}.")


def _edges(contents: list[str]) -> list[str]:
    """The contents, and as a template may trim them: either may meet a token's other part."""
    return [*contents, *(content.strip() for content in contents)]


def _mark(texts: Sequence[str]) -> str:
    """A word that stands in none of the texts, of letters and digits: no template trims it."""
    while True:
        # Drawn at random: nobody can write a text that holds many of them.
        mark = f"dInferSlot{secrets.token_hex(8)}n"
        if not any(mark in text for text in texts):
            return mark


def _as_rendered(parts: list[str], contents: list[str], whole: str) -> list[str]:
    """The contents trimmed as the template trims them, as far as its own rendering shows it."""
    for trimmed in (contents, [content.strip() for content in contents]):
        filled = (trimmed[int(p)] if i % 2 else p for i, p in enumerate(parts))
        if "".join(filled) == whole:
            return trimmed
    return contents


class _Generation(Extension):
    """Reads `{% generation %}` blocks, which mark an answer for training and do nothing here."""

    tags = {"generation"}  # noqa: RUF012 (the base class asks for a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Environment:
    """What Hugging Face gives to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"The chat template refuses these messages: {message}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which Jinja's own filter would add."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
