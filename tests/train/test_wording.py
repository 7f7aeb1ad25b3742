"""Free-wording problems and tables, and the hand-written dev set."""

import math
import random
import re

import pytest

from dinfer.train import word_kinds
from dinfer.train.corpus import OWN, draws, first_of, make_tokenizer
from dinfer.train.own_words import own_problems, own_tables
from dinfer.train.problems import Problem, final_number
from dinfer.train.tables import Table, draw_table, table_facts_right
from dinfer.train.word_problems import draw_word_problem
from dinfer.train.wording import (
    SMALL,
    TENS,
    Person,
    agree,
    expand,
    in_words,
    plural,
    wordings,
)


def numbers_in(text: str) -> set[int]:
    """Every number of a text, in digits or words; the words are read by another rule than that
    which writes them.
    """
    values = {word: value for value, word in enumerate(SMALL)}
    values |= {word: 10 * (place + 2) for place, word in enumerate(TENS)} | {"half": 2, "twice": 2}
    found = {int(n) for n in re.findall(r"\d+", text.replace(",000", ""))}
    for word in re.findall(r"[a-z]+(?:-[a-z]+)?", text.lower()):
        parts = word.split("-")
        if all(part in values for part in parts):
            found.add(sum(values[part] for part in parts))
    return found


def test_worked_answers_are_right() -> None:
    """Each step is checked with Python's own arithmetic; it uses only numbers that the problem
    states or that an earlier step found.
    """
    rng, kinds = random.Random(5), set()
    for _ in range(4000):
        problem = draw_word_problem(rng)
        kinds.add(re.sub(r" \[.*", "", problem.key))
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", problem.answer)
        # Twice, half, the two sides of a rectangle: 2 need not be written.
        known = numbers_in(problem.question) | {2}
        for a, sign, b, c in steps:
            assert eval(f"{a}{sign}{b}") == int(c)  # division too has no remainder
            assert {int(a), int(b)} <= known, problem
            known.add(int(c))
        assert final_number(problem.answer) == problem.result == int(steps[-1][3])
        assert not re.search(r"[{}\[\]|~]", problem.question), problem
        assert not problem.question[0].islower()
    assert kinds == {f"words {kind.name}" for kind in word_kinds.KINDS}


def test_every_kind_has_several_hundred_wordings() -> None:
    around = wordings(word_kinds.ASK_LAST) + wordings(word_kinds.ASK_FIRST)
    for kind in word_kinds.KINDS:
        found = math.prod(wordings(part) for part in (*kind.story, kind.question))
        assert found * around >= 500, kind.name


def test_wordings_are_counted_as_they_are_drawn() -> None:
    grammar = "a [b|c [d|e|]] [|x]"
    rng = random.Random(0)
    assert len({expand(rng, grammar) for _ in range(500)}) == wordings(grammar) == 8


def test_small_words() -> None:
    assert [in_words(n) for n in (0, 13, 40, 72, 100, 115, 240)] == [
        "zero", "thirteen", "forty", "seventy-two", "a hundred", "a hundred and fifteen", "240",
    ]  # fmt: skip
    assert [plural(x) for x in ("box", "key", "candy", "tomato", "sheep dog")] == [
        "boxes", "keys", "candies", "tomatoes", "sheep dogs",
    ]  # fmt: skip
    me, anna = Person("I", "I", "my", "me"), Person("Anna", "she", "her", "her")
    assert agree("how many ~does I have if I buys two from I's box", me) == (
        "how many do I have if I buy two from my box"
    )
    assert agree("Anna ~carries it", anna) == "Anna carries it"


def test_tables_keep_their_numbers_and_names() -> None:
    """Every figure of the brief is one of the table or a difference of two of them."""
    rng = random.Random(6)
    for _ in range(3000):
        table = draw_table(rng)
        facts, there = table.facts, numbers_in(table.prompt)
        assert facts["name"] in table.prompt
        given = {
            int(facts[x]) for x in ("year", "revenue", "before", "costs", "earned") if x in facts
        }
        assert given <= there, table
        for a, b, c in re.findall(r"(\d+)-(\d+)=(\d+)", table.answer):
            assert int(a) - int(b) == int(c) and {int(a), int(b)} <= given
        assert all(table_facts_right(table, table.answer).values())
        assert facts.get("result", "profit") == (
            "profit" if int(facts["revenue"]) > int(facts.get("costs", "0")) else "loss"
        )


def test_a_wrong_figure_of_a_table_is_one_fact_less() -> None:
    table = own_tables()[0]
    found = table_facts_right(table, table.answer.replace("=23", "=24"))
    assert [name for name, right in found.items() if not right] == ["profit"]
    assert not any(right for name, right in table_facts_right(table, "").items() if name != "unit")


def test_own_words_are_right() -> None:
    """The final number of each problem is what its working gives; each table states its facts."""
    problems, tables = own_problems(), own_tables()
    assert len(problems) == 200 and len(tables) == 60
    for problem in problems:
        working = problem.answer.split("=")[0]
        assert eval(working) == problem.result == final_number(problem.answer)
    for table in tables:
        stated = [table.facts[x] for x in ("name", "year", "revenue", "before", "costs", "earned")
                  if x in table.facts]  # fmt: skip
        assert all(fact in table.prompt for fact in stated), table
    assert [e.key for e in first_of("words", OWN, 0, 200)] == [p.key for p in problems]


def bare(text: str) -> str:
    """A text without its numbers and names, so that wordings are compared."""
    text = re.sub(r"\b[A-Z]\w*", "N", text)
    return re.sub(rf"\d+|\b({'|'.join([*SMALL, *TENS])})\b", "0", text.lower())


def test_own_words_are_never_generated() -> None:
    own = {bare(e.question) for e in own_problems()} | {bare(e.prompt) for e in own_tables()}
    rng = random.Random(7)
    assert not own & {bare(draw_word_problem(rng).question) for _ in range(8000)}
    assert not own & {bare(draw_table(rng).prompt) for _ in range(4000)}


@pytest.mark.parametrize(("task", "kind"), [("words", Problem), ("tables", Table)])
def test_splits_of_free_wording(task: str, kind: type) -> None:
    train, test = ({e.key for e in first_of(task, split, 1, 300)} for split in ("train", "test"))
    assert not train & test
    assert isinstance(next(draws(task, "dev", 0)), kind)


def test_any_text_can_be_read_and_written() -> None:
    tokenizer = make_tokenizer(0, 400, ("words", "tables"))
    text = "Grünwald 诗 Ωmega-7 & Søn \t{x}"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
