"""Examples of the user's own for training: JSON lines of prompts and answers."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dinfer.errors import DinferError


@dataclass(frozen=True)
class OwnExample:
    """One line of a data file."""

    prompt: str
    answer: str


def read_examples(path: Path) -> list[OwnExample]:
    """The examples of a JSONL file whose lines are `{"prompt": ..., "answer": ...}`. Raises
    DinferError, which names the line, where one is not of that form.
    """
    if not path.is_file():
        raise DinferError(f"--data is {str(path)!r}; there is no such file.")
    lines = path.read_text(encoding="utf-8").split("\n")
    examples = [
        _example(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not examples:
        raise DinferError(f"{path} has no examples.")
    return examples


def _example(line: str, place: str) -> OwnExample:
    try:
        given = json.loads(line)
        prompt, answer = given["prompt"], given["answer"]
    except (ValueError, KeyError, TypeError):
        prompt = answer = None
    if not (isinstance(prompt, str) and isinstance(answer, str) and prompt and answer):
        raise DinferError(f'{place}: a line must be {{"prompt": "...", "answer": "..."}}.')
    return OwnExample(prompt, answer)


def endless(examples: list[OwnExample], seed: int) -> Iterator[OwnExample]:
    """All examples in a random order, again and again, each time in another one."""
    rng, order = random.Random(f"own {seed}"), list(examples)
    while True:
        rng.shuffle(order)
        yield from order
