"""Conversations to token ids, with the chat template that a checkpoint brings."""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dinfer.errors import CheckpointError, RequestError
from dinfer.text.guard import Guard, texts_in
from dinfer.text.tokenizer import Tokenizer, read_json, special_tokens

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages as the model was trained to see them, in a sandbox, as Hugging Face does."""

    def __init__(
        self,
        source: str,
        constants: Mapping[str, Any] | None = None,
        named: Mapping[str, str] | None = None,
    ) -> None:
        """`source` is a Jinja template; `constants` are its named tokens, such as `eos_token`;
        `named` are further templates by name, of which `tool_use` is taken for tools.

        Raises CheckpointError where a source is no valid template.
        """
        self._source, self._constants = source, dict(constants or {})
        self._template = _compiled(source)
        self._named = {name: _compiled(text) for name, text in (named or {}).items()}

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a checkpoint's folder, None where it brings none.

        Raises CheckpointError where a file is damaged.
        """
        source = read_json(folder / "tokenizer_config.json").get("chat_template")
        named: dict[str, str] = {}
        if isinstance(source, list):
            entries = [entry for entry in source if isinstance(entry, dict)]
            named = {str(entry.get("name")): entry.get("template", "") for entry in entries}
            source = named.pop("default", None)
        if (file := folder / "chat_template.jinja").is_file():
            source = _read(file)
        for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            named[other.stem] = _read(other)
        return cls(source, special_tokens(folder), named) if isinstance(source, str) else None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation. `variables` go to the template (`enable_thinking`, `tools`);
        `chat_template` among them is the name of one of several templates.

        Raises RequestError for messages of the wrong shape and where the template refuses them.
        """
        check_messages(messages)
        template = self._chosen(variables)
        known = {"tools": None, "documents": None} | self._constants | variables
        known |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(known)
        except RequestError:
            raise
        except Exception as error:  # a template is a program of others: it may fail in any way
            raise RequestError(
                f"The chat template cannot render these messages: {error}."
            ) from error

    def _chosen(self, variables: dict[str, Any]) -> Template:
        """The template of a name, which is taken out of the variables, or the one for tools, or the
        ordinary one.
        """
        name = variables.pop("chat_template", None)
        if name is None:
            return (
                self._named.get("tool_use", self._template)
                if variables.get("tools") is not None
                else self._template
            )
        if name == "default":
            return self._template
        if not isinstance(name, str) or name not in self._named:
            known = ", ".join(["default", *self._named])
            raise RequestError(f"Unknown chat template {name!r}. Allowed: {known}.")
        return self._named[name]

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation: those of transformers' apply_chat_template, except that
        no special token ever comes from what the messages and variables hold. Contents in parts
        are joined where the template does not take parts.

        Added tokens that are no special ones, such as `<think>`, are read there too. Raises
        RequestError as `render` does, and for a role with the text of a special token.
        """
        check_messages(messages)
        self._check_roles(tokenizer, messages)
        if any(isinstance(message.get("content"), list) for message in messages):
            messages = messages if self._takes_parts(variables) else [*map(_joined, messages)]
        guard = Guard(tokenizer, (self._source, *texts_in(messages), *texts_in(variables)))
        marked = {name: guard(value) for name, value in variables.items()}
        text = self.render(guard(messages), add_generation_prompt, **marked)
        return tokenizer.encode_marked(text, guard.mark)

    def _takes_parts(self, variables: dict[str, Any]) -> bool:
        """Whether the template reads a list of parts as it reads their text."""
        mark = _mark((self._source,))
        parts = [{"type": "text", "text": mark}]
        try:
            one, other = (
                self.render([{"role": "user", "content": content}], **variables)
                for content in (parts, mark)
            )
        except RequestError:
            return False
        return one == other

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


def _compiled(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise CheckpointError(f"The chat template is not valid Jinja: {error}.") from error


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def check_messages(messages: Any) -> None:
    """Raises RequestError unless each message is an object with a string for its role, and for its
    content a string, text parts, or nothing beside calls of tools.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("Messages must be a list with at least one message.")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"Message {place} must be an object with role and content.")
        for key in ("role", "content"):
            if key not in message and not (key == "content" and message.get("tool_calls")):
                raise RequestError(f"Message {place} has no {key}.")
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(place, content)
        elif content is not None or not message.get("tool_calls"):
            _check_string(place, "content", content)
        _check_string(place, "role", message["role"])


def _check_string(place: int, key: str, value: Any) -> None:
    if not isinstance(value, str):
        kind = type(value).__name__
        raise RequestError(f"The {key} of message {place} must be a string, not {kind}.")


def _check_parts(place: int, parts: list[Any]) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"A part of the content of message {place} is of the type {kind!r}; only"
                ' {"type": "text", "text": "..."} is supported.'
            )


def _joined(message: Message) -> Message:
    """The message with the text of its parts as one string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _mark(texts: Sequence[str]) -> str:
    """A word that stands in none of the texts, of letters and digits: no template trims it."""
    while True:
        # Drawn at random: nobody can write a text that holds many of them.
        mark = f"dInferSlot{secrets.token_hex(8)}n"
        if not any(mark in text for text in texts):
            return mark


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
