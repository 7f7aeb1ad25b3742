"""Scores of the bundled tasks on held-out problems, and the cost of getting them."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dinfer.engine.llm import LLM
from dinfer.request import Output, SamplingParams
from dinfer.train.brief import Brief, facts_right
from dinfer.train.corpus import Example, first_of, prompt_of
from dinfer.train.problems import Problem, final_number
from dinfer.train.tables import Table, table_facts_right


@dataclass(frozen=True)
class Score:
    """One evaluation. accuracy, facts (brief, tables): percent; names: percent of the tables whose
    company is named anywhere in the answer; bleu: sacrebleu's, 0 to 100, None without the package.

    seconds: wall time of all problems with `concurrency` at once; single_tokens_per_second: of the
    first `single_num` problems one at a time, in the same run.
    """

    task: str
    split: str
    num: int
    accuracy: float
    facts: float | None
    bleu: float | None
    forward_passes: float
    tokens_per_forward: float
    tokens: int
    seconds: float
    tokens_per_second: float
    names: float | None = None
    single_num: int = 0
    single_tokens_per_second: float | None = None


def evaluate(
    llm: LLM,
    task: str,
    split: str,
    num: int,
    params: SamplingParams,
    seed: int = 0,
    single_num: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """Runs `num` problems of a split together (the engine admits as many as it has places for) and
    scores them.
    """
    examples, chats = draw(llm, task, split, num, seed)
    single = _one_at_a_time(llm, chats[:single_num], params) if single_num else None
    finished = itertools.count(1)
    began = time.perf_counter()
    outputs = llm.generate(
        chats,
        params,
        on_output=lambda _: progress(next(finished)),
    )
    seconds = time.perf_counter() - began
    tokens = sum(output.stats.tokens for output in outputs)
    return Score(
        task=task,
        split=split,
        num=num,
        **vars(grade(examples, [output.text for output in outputs])),
        forward_passes=statistics.fmean(output.stats.forward_passes for output in outputs),
        tokens_per_forward=tokens / sum(output.stats.forward_passes for output in outputs),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        single_num=min(single_num, num),
        single_tokens_per_second=single,
    )


def draw(
    llm: LLM, task: str, split: str, num: int, seed: int = 0
) -> tuple[list[Example], list[list[int]]]:
    """The first `num` problems of a split, and their prompts as token ids. Raises DinferError
    where the split has fewer.
    """
    examples = first_of(task, split, seed, num)
    return examples, [
        llm.prompts.chat([{"role": "user", "content": prompt_of(e)}]) for e in examples
    ]


@dataclass(frozen=True)
class Grade:
    """Quality of answers, as in Score."""

    accuracy: float
    facts: float | None
    bleu: float | None
    names: float | None = None


def grade(examples: Sequence[Example], texts: Sequence[str]) -> Grade:
    """Scores the texts that were answered to the examples."""
    pairs = list(zip(examples, texts, strict=True))
    facts = [_facts(e, text) for e, text in pairs if isinstance(e, Brief | Table)]
    names = [e.facts["name"] in text for e, text in pairs if isinstance(e, Table)]
    return Grade(
        accuracy=100 * statistics.fmean(_right(e, text) for e, text in pairs),
        facts=100 * statistics.fmean(facts) if facts else None,
        bleu=bleu(list(texts), [e.answer for e in examples]),
        names=100 * statistics.fmean(names) if names else None,
    )


def _facts(example: Brief | Table, text: str) -> float:
    """Share of the facts that the text states, 0 to 1."""
    if isinstance(example, Brief):
        return facts_right(example, text)
    return statistics.fmean(table_facts_right(example, text).values())


def _right(example: Example, text: str) -> bool:
    """math, words: the exact final number; brief, tables: every fact right."""
    if isinstance(example, Brief | Table):
        return _facts(example, text) == 1.0
    assert isinstance(example, Problem)
    return final_number(text) == example.result


def _one_at_a_time(llm: LLM, chats: list[list[int]], params: SamplingParams) -> float:
    began = time.perf_counter()
    outputs: list[Output] = [llm.generate(chat, params)[0] for chat in chats]
    return sum(output.stats.tokens for output in outputs) / (time.perf_counter() - began)


def bleu(texts: Sequence[str], references: Sequence[str]) -> float | None:
    """sacrebleu's corpus score, 0 to 100; None without the package."""
    try:
        from sacrebleu import corpus_bleu
    except ImportError:
        return None
    return float(corpus_bleu(list(texts), [list(references)]).score)
