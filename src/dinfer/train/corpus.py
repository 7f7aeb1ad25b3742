"""Training, dev and test data of the two tasks, its tokenizer, and examples as token ids."""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dinfer.errors import DinferError
from dinfer.train.arithmetic import (
    ArithmeticExample,
    draw_arithmetic,
    draw_larger_arithmetic,
)
from dinfer.train.brief import Brief, draw_brief
from dinfer.train.own_data import OwnExample
from dinfer.train.own_words import own_problems, own_tables
from dinfer.train.problems import Problem, draw_problem
from dinfer.train.tables import Table, draw_table
from dinfer.train.word_problems import draw_word_problem

EOS, MASK, START, END = "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPLITS = ("train", "dev", "test")
TASKS = ("math", "brief", "words", "tables")
OWN = "own"
"""The split of *words* and *tables* that people wrote; nothing is trained on it."""
Generated = Problem | Brief | Table | ArithmeticExample
Example = Generated | OwnExample

DRAW: dict[str, Callable[[random.Random], Generated]] = {
    "math": draw_problem,
    "brief": draw_brief,
    "words": draw_word_problem,
    "tables": draw_table,
    "drill": draw_arithmetic,
    "sums": draw_larger_arithmetic,
}
"""`drill` and `sums` are material for training alone."""
_OWN: dict[str, Callable[[], Sequence[Problem | Table]]] = {
    "words": own_problems,
    "tables": own_tables,
}
RESULT_WEIGHT = 3.0
"""Weight in the loss of the digits behind an equals sign and of those of a brief: they are few, and
they are what is hard.
"""


def split_of(key: str) -> str:
    """The split of a skeleton: a hash of it, so the same figures are always in the same split (5 %
    dev, 5 % test).
    """
    bucket = hashlib.sha256(key.encode()).digest()[0]
    return "test" if bucket < 13 else "dev" if bucket < 26 else "train"


FRUITLESS = 20_000
"""Drawings that show that a split has no more: a second of them."""


def draws(task: str, split: str, seed: int) -> Iterator[Example]:
    """Examples of a task, all of the given split: endless ones to train on; dev and test give each
    skeleton once, and end when FRUITLESS drawings in a row have found no new one.
    """
    if task not in DRAW:
        raise DinferError(f"Unknown task {task!r}; the tasks are {', '.join(TASKS)}.")
    if split == OWN and task in _OWN:
        yield from _OWN[task]()
        return
    if split not in SPLITS:
        own = f", and {OWN} of {' and '.join(_OWN)}"
        raise DinferError(f"Unknown split {split!r}; the splits are {', '.join(SPLITS)}{own}.")
    rng = random.Random(f"{task} {split} {seed}")
    seen: set[str] = set()
    fruitless = 0
    while fruitless < FRUITLESS:
        example = DRAW[task](rng)
        if split_of(example.key) != split or example.key in seen:
            fruitless += 1
            continue
        fruitless = 0
        if split != "train":
            seen.add(example.key)
        yield example


def own_size(task: str) -> int:
    """Examples of the split *own* of a task; 0 where it has none."""
    return len(_OWN[task]()) if task in _OWN else 0


def first_of(task: str, split: str, seed: int, num: int) -> list[Example]:
    """The first `num` examples. Raises DinferError where the split has fewer."""
    found = list(itertools.islice(draws(task, split, seed), num))
    if len(found) < num:
        raise DinferError(
            f"{num} problems were asked for; the {split} split of {task} has {len(found)}."
        )
    return found


def prompt_of(example: Example) -> str:
    """The user's message of an example."""
    return example.question if isinstance(example, Problem) else example.prompt


def make_tokenizer(
    seed: int, size: int = 832, tasks: Sequence[str] = ("math", "brief")
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of `size` ids, learnt on training examples; digits stand alone.
    Every byte is a token, so any text can be read and written.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS, MASK, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, 20_000, tasks), trainer)
    return tokenizer


def _texts(seed: int, num: int, tasks: Sequence[str]) -> Iterator[str]:
    """Training texts in turns, three of each task to one of the next (tables have few words)."""
    streams = [draws(task, "train", seed) for task in tasks]
    for i in range(num):
        example = next(streams[i // 4 % (len(streams) // 2) * 2 + (i % 4 == 3)])
        yield f"user\n{prompt_of(example)}"
        yield f"assistant\n{example.answer}"


@dataclass(frozen=True)
class Ids:
    """An example as token ids: the rendered prompt, the answer with its end-of-turn token, the
    weight of each answer token in the loss, and which of them are digits."""

    prompt: list[int]
    answer: list[int]
    weights: list[float]
    digits: list[bool]


def encode(tokenizer: tokenizers.Tokenizer, examples: Sequence[Example]) -> list[Ids]:
    """Token ids of examples, rendered with the chat template of the bundled models."""
    prompts = [f"{START}user\n{prompt_of(e)}{END}\n{START}assistant\n" for e in examples]
    answers = [e.answer + END for e in examples]
    coded = tokenizer.encode_batch(prompts + answers, add_special_tokens=False)
    half = len(examples)
    return [
        Ids(p.ids, a.ids, _weights(a.tokens, example), [token.isdigit() for token in a.tokens])
        for p, a, example in zip(coded[:half], coded[half:], examples, strict=True)
    ]


def _weights(tokens: list[str], example: Example) -> list[float]:
    """Digits behind an equals sign weigh more, and so do all of a brief; in a drill nothing else
    counts, as it is random.
    """
    weights, result = [], isinstance(example, Brief)
    usual = 0.0 if isinstance(example, ArithmeticExample) else 1.0
    for token in tokens:
        if not isinstance(example, Brief):
            result = token == "=" or (result and token.isdigit())
        weights.append(RESULT_WEIGHT if result and token.isdigit() else usual)
    return weights
