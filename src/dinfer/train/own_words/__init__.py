"""Word problems and tables written by hand, in other words than the generators': a dev set that
nothing is trained on.

`problems.tsv` has the final number, how it is worked out, and the text of each problem;
`tables.txt` the facts of each table in a line that begins with `@`, then its text.
"""

from functools import cache
from importlib.resources import files

from dinfer.train.problems import Problem
from dinfer.train.tables import Table, brief_of, table_facts


def _text(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


@cache
def own_problems() -> list[Problem]:
    """The word problems."""
    lines = [line.split("\t") for line in _text("problems.tsv").splitlines() if line]
    return [
        Problem(f"own words {place}", question, f"{worked}={number}\n#### {number}", int(number))
        for place, (number, worked, question) in enumerate(lines)
    ]


@cache
def own_tables() -> list[Table]:
    """The tables, with the brief that states their facts."""
    blocks = _text("tables.txt").strip().removeprefix("@").split("\n@")
    return [_table(place, *block.split("\n", 1)) for place, block in enumerate(blocks)]


def _table(place: int, line: str, prompt: str) -> Table:
    name, year, unit, *amounts = (part.strip() for part in line.split("|"))
    revenue, before, costs, earned = (int(amount) if amount else None for amount in amounts)
    assert revenue is not None, f"table {place} has no revenue"
    facts = table_facts(name, int(year), unit, revenue, before, costs, earned)
    return Table(f"own tables {place}", prompt.strip(), brief_of(facts), facts)
