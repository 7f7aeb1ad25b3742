"""Strategies against one another on the same prompts: quality beside speed."""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dinfer.engine.llm import LLM
from dinfer.errors import RequestError
from dinfer.eval.semantic import Embed, score
from dinfer.eval.tasks import bleu, draw, grade
from dinfer.request import Output, SamplingParams
from dinfer.train.corpus import TASKS, Example

PLAIN = "fixed"
"""The decoder that sets one token a step: what the others are held against."""


@dataclass(frozen=True)
class Item:
    """A prompt as token ids, and what is known of its answer: an example of a bundled task, or a
    text of the user's, or nothing.
    """

    prompt: list[int]
    example: Example | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Choice:
    """A combination of strategies; None = what the model recommends."""

    decoder: str | None = None
    cache: str | None = None
    iteration: str | None = None

    def params(self, base: SamplingParams) -> SamplingParams:
        """The base with these strategies."""
        return replace(base, decoder=self.decoder, cache=self.cache, iteration=self.iteration)

    def specs(self) -> dict[str, str]:
        """The strategies that are not left to the model."""
        return {name: spec for name, spec in vars(self).items() if spec is not None}


@dataclass(frozen=True)
class Row:
    """What one choice gave. accuracy: right answers in percent (of a brief, facts; of a user's
    text, equal to the answer after trimming); bleu against the known answers and bleu_plain
    against the one-token-per-step run; semantic, if asked for, against the known answers, or that
    run where none is known; figures of cost are means over the prompts, seconds those of the whole.
    """

    choice: Choice
    accuracy: float | None
    bleu: float | None
    bleu_plain: float | None
    forward_passes: float
    tokens_per_forward: float
    rows_run: float
    seconds: float
    semantic: float | None = None


def task_items(llm: LLM, task: str, split: str, num: int) -> list[Item]:
    """Problems of a bundled task."""
    examples, prompts = draw(llm, task, split, num)
    return [Item(p, e, e.answer) for p, e in zip(prompts, examples, strict=True)]


def file_items(llm: LLM, file: Path) -> list[Item]:
    """A user's JSON lines, each with `prompt` and perhaps `answer`. Raises RequestError with the
    number of a line that is wrong.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{str(file)!r} cannot be read as text: {error}.") from error
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            prompt, answer = given["prompt"], given.get("answer")
            assert isinstance(prompt, str) and isinstance(answer, str | None)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise RequestError(
                f'{str(file)!r}, line {number}: each line must be {{"prompt": "...", "answer":'
                ' "..."}, the answer may be left out.'
            ) from error
        items.append(Item(llm.prompts.chat([{"role": "user", "content": prompt}]), None, answer))
    if not items:
        raise RequestError(f"{str(file)!r} holds no prompt.")
    return items


def items_of(llm: LLM, task: str, split: str, num: int) -> list[Item]:
    """Problems of a bundled task, or the first `num` lines of a user's file."""
    return task_items(llm, task, split, num) if task in TASKS else file_items(llm, Path(task))[:num]


def every(
    decoders: Sequence[str | None], caches: Sequence[str | None], iterations: Sequence[str | None]
) -> list[Choice]:
    """All combinations; an empty list stands for what the model recommends."""
    return [
        Choice(*specs)
        for specs in itertools.product(decoders or [None], caches or [None], iterations or [None])
    ]


class Meter:
    """Runs choices on the same items. embed: asks for semantic scores."""

    def __init__(
        self, llm: LLM, items: Sequence[Item], params: SamplingParams, embed: Embed | None = None
    ) -> None:
        self.llm, self.items, self.params, self.embed = llm, items, params, embed
        self._plain: list[str] | None = None

    def check(self, choices: Iterable[Choice]) -> None:
        """Raises for a combination that is impossible, before anything runs."""
        for choice in choices:
            self.llm.engine.strategy(choice.params(self.params))

    @property
    def plain(self) -> list[str]:
        """Texts of the one-token-per-step run without a cache that is not exact."""
        if self._plain is None:
            cache = "none" if self.llm.facts.block_length is None else "block"
            self._plain = [o.text for o in self._run(Choice(PLAIN, cache))[0]]
        return self._plain

    def measure(self, choice: Choice) -> Row:
        """One choice."""
        plain = self.plain
        outputs, seconds = self._run(choice)
        texts = [output.text for output in outputs]
        passes = sum(output.stats.forward_passes for output in outputs)
        known = [(t, i.answer) for t, i in zip(texts, self.items, strict=True) if i.answer]
        return Row(
            choice,
            self._accuracy(texts),
            bleu([t for t, _ in known], [a for _, a in known]) if known else None,
            bleu(texts, plain),
            passes / len(outputs),
            sum(output.stats.tokens for output in outputs) / passes,
            sum(output.stats.rows_run for output in outputs) / len(outputs),
            seconds,
            self._semantic(texts),
        )

    def _semantic(self, texts: Sequence[str]) -> float | None:
        if self.embed is None:
            return None
        answers = [item.answer for item in self.items]
        wanted = answers if any(answers) else self.plain
        pairs = [(text, want) for text, want in zip(texts, wanted, strict=True) if want]
        if not pairs:
            return None
        return score(self.embed([text for text, _ in pairs]), self.embed([w for _, w in pairs]))

    def _run(self, choice: Choice) -> tuple[list[Output], float]:
        prompts = [item.prompt for item in self.items]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, choice.params(self.params))
        return outputs, time.perf_counter() - began

    def _accuracy(self, texts: Sequence[str]) -> float | None:
        """Without known answers, agreement with the one-token-per-step run."""
        examples = [item.example for item in self.items]
        if all(example is not None for example in examples):
            found = grade([e for e in examples if e is not None], texts)
            return found.accuracy if found.facts is None else found.facts
        wanted = [
            plain if item.answer is None else item.answer
            for item, plain in zip(self.items, self.plain, strict=True)
        ]
        same = [t.strip() == w.strip() for t, w in zip(texts, wanted, strict=True)]
        return 100 * sum(same) / len(same)


def front(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other row beats in both accuracy and seconds (the Pareto front)."""

    def better(a: Row, b: Row) -> bool:
        mine, other = (a.accuracy or 0.0, -a.seconds), (b.accuracy or 0.0, -b.seconds)
        return all(x >= y for x, y in zip(mine, other, strict=True)) and mine != other

    return [row for row in rows if not any(better(other, row) for other in rows)]


CANDIDATES = [
    *(f"threshold:threshold={t}" for t in (0.8, 0.9, 0.95, 0.98)),
    *(f"factor:factor={f}" for f in (0.5, 1.0)),
    *(f"entropy:bound={b}" for b in (0.05, 0.2)),
    *("hierarchy", "klass", "localleap", "slowfast", "credit"),
]
"""Decoders that `tune` tries."""


def tune(
    meter: Meter, confirm: Meter, max_loss: float, say: Callable[[Row], None] = lambda row: None
) -> tuple[Choice, Row, Row]:
    """The quickest choice that loses at most `max_loss` points of accuracy against one token a
    step: found on the items of `meter`, step by step (decoders, then caches, then iterations), and
    confirmed on those of `confirm`. Returns it with its row there and the plain one's.
    """
    facts = meter.llm.facts
    block = facts.block_length
    caches = ["block"] if block else ["vicinity:left=16:right=16", "dual", "prefix", "none"]
    caches.append("vicinity:left=0:right=0:reopen=false")
    lengths = [n for n in (8, 16, 32) if not block or block % n == 0]
    windows = [f"blockwise:length={n}:aligned={'true' if block else 'false'}" for n in lengths]
    windows += [] if block else ["pruned", "pruned:length=32:ahead=1"]
    plain = Choice(PLAIN, "block" if block else "none")
    best = meter.measure(plain)
    goal = (best.accuracy or 0.0) - max_loss
    tried = [best, meter.measure(Choice())]  # the model's own recommendation is one of them
    say(tried[-1])
    for stage, options in (("decoder", CANDIDATES), ("cache", caches), ("iteration", windows)):
        for spec in options:
            row = meter.measure(replace(best.choice, **{stage: spec}))
            say(row)
            tried.append(row)
        best = min(
            (row for row in tried if (row.accuracy or 0.0) >= goal), key=lambda row: row.seconds
        )
    reference = confirm.measure(plain)
    wanted = (reference.accuracy or 0.0) - max_loss
    for row in sorted(tried, key=lambda row: row.seconds):
        if (row.accuracy or 0.0) >= goal:
            found = confirm.measure(row.choice)
            if (found.accuracy or 0.0) >= wanted:
                return row.choice, found, reference
    return plain, reference, reference
