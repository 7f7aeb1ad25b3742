"""English word problems in free wording (the task *words*): a kind of story, its numbers, and a
wording drawn from the grammars of `word_kinds`.

The split is a hash of kind and numbers, so no two splits share a problem even in other words.
"""

import random
import re
from operator import add, floordiv, mul, sub

from dinfer.train import word_kinds as kinds
from dinfer.train.problems import Problem
from dinfer.train.wording import (
    Person,
    agree,
    expand,
    fill,
    in_words,
    invented_name,
    people,
    plural,
    sentence,
)

LARGEST = 240
"""No number of a problem or of its solution is larger."""

_SIZES = {"s": (2, 12), "m": (2, 60), "l": (10, 150)}
_SIGNS = {"+": add, "-": sub, "*": mul, "/": floordiv}
_SAID = {"+": "Add", "-": "Take away", "*": "Times", "/": "Divide by"}
_PEOPLE = people(kinds.MEN, "he", "his", "him") + people(kinds.WOMEN, "she", "her", "her")
_I = Person("I", "I", "my", "me")


def solve(formula: str, numbers: dict[str, int]) -> list[tuple[int, str, int, int]] | None:
    """The steps of a formula as (left, sign, right, result); None where a step leaves the positive
    whole numbers up to LARGEST.
    """
    known, steps = dict(numbers), []
    for place, step in enumerate(formula.split("; "), 1):
        match = re.fullmatch(r"(\w+?)([-+*/])(\w+)", step)
        assert match, step
        left, right = (int(x) if x.isdigit() else known[x] for x in (match[1], match[3]))
        sign = match[2]
        result = _SIGNS[sign](left, right)
        if not 0 < result <= LARGEST or (sign == "/" and left % right):
            return None
        known["_"] = known[f"_{place}"] = result
        steps.append((left, sign, right, result))
    return steps


def _numbers(
    rng: random.Random, kind: kinds.Kind
) -> tuple[dict[str, int], list[tuple[int, str, int, int]]]:
    while True:
        numbers = {
            x: rng.randint(*_SIZES[size]) for x, size in zip("abde", kind.sizes, strict=False)
        }
        if rng.random() < 0.3 and kind.formula.startswith("a*b"):  # the first factor is larger
            numbers["a"], numbers["b"] = numbers["b"], numbers["a"]
        if steps := solve(kind.formula, numbers):
            return numbers, steps


def _written(rng: random.Random, numbers: dict[str, int], story: str) -> dict[str, str]:
    """The numbers as the story writes them: digits, or now and then words; amounts behind a
    currency sign stay in digits.
    """
    share = rng.choice([0.0, 0.0, 0.1, 0.9])
    return {
        x: in_words(n)
        if "${" + x + "}" not in story and n < 100 and rng.random() < share
        else str(n)
        for x, n in numbers.items()
    }


def _cast(rng: random.Random) -> tuple[Person, dict[str, str]]:
    """Who acts, and the words for people and things."""
    first, second, third = rng.sample(_PEOPLE, 3)
    if rng.random() < 0.1:
        first = _I
    elif rng.random() < 0.25:
        first = Person(invented_name(rng), first.subject, first.possessive, first.object)
    if rng.random() < 0.15:
        second = Person(invented_name(rng), "he", "his", "him")
    thing, other = rng.sample(kinds.THINGS, 2)
    container = rng.choice(kinds.CONTAINERS)
    return first, {
        "N": first.name,
        "F": second.name,
        "G": third.name,
        "p": first.subject,
        "s": first.possessive,
        "h": first.object,
        "i": thing,
        "o": plural(thing),
        "u": plural(other),
        "c": container,
        "cc": plural(container),
    }


def draw_word_problem(rng: random.Random) -> Problem:
    """Draws one problem; the same state of `rng` gives the same one."""
    kind = rng.choice(kinds.KINDS)
    numbers, steps = _numbers(rng, kind)
    actor, slots = _cast(rng)
    told = " ".join(kind.story) + kind.question
    if "$" in told:
        slots["i"] = rng.choice(kinds.GOODS)
        slots["o"] = plural(slots["i"])
    elif kind.story[0] is kinds.PEOPLE:
        slots["o"] = plural(rng.choice(kinds.MEMBERS))
    story = [expand(rng, part.replace("a {u}", "a {u1}")) for part in kind.story]
    question = expand(rng, kind.question)
    slots["u1"] = rng.choice(kinds.GOODS)
    if rng.random() < 0.2:
        aside = expand(rng, rng.choice(kinds.ASIDES)).replace("{x}", str(rng.randint(2, 60)))
        story.insert(rng.randint(0, len(story)), aside)
    slots |= _written(rng, numbers, " ".join([*story, question]))
    parts = [agree(fill(part, slots), actor) for part in story]
    asked = agree(fill(question, slots), actor)
    return Problem(
        f"words {kind.name} {list(numbers.values())}",
        _arranged(rng, parts, asked),
        _worked(steps),
        steps[-1][-1],
    )


def _worked(steps: list[tuple[int, str, int, int]]) -> str:
    lines = [f"{_SAID[sign]} {b}: {a}{sign}{b}={c}." for a, sign, b, c in steps]
    return "\n".join([*lines, f"#### {steps[-1][-1]}"])


def _arranged(rng: random.Random, parts: list[str], question: str) -> str:
    """Story and question in one text: sentences, one sentence with "and", or "if ..., how many"."""
    style = rng.random()
    if style < 0.15 and not any("." in part for part in parts):
        head = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
        joined = f"If {_inner(head)}, {_inner(question)}"
        return sentence(joined)
    if style < 0.22 and not any("." in part for part in parts):
        head = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
        return sentence(f"{question[:-1]} if {_inner(head)}?")
    if style < 0.4 and len(parts) > 1:
        link = rng.choice([", and ", " and ", ", then ", "; "])
        parts = [parts[0] + link + _inner(parts[1]), *parts[2:]]
    told = " ".join(sentence(part.removesuffix(".")) + "." for part in parts)
    layout = kinds.ASK_FIRST if rng.random() < 0.15 else kinds.ASK_LAST
    return fill(expand(rng, layout), {"t": told, "q": sentence(question)})


def _inner(text: str) -> str:
    """A sentence's text inside another one: articles and question words lose their capital."""
    words = (
        "A|An|The|There|How|What|In|It|Each|One|Half|Then|Later|With|By|For|After|We|At|They|School"
    )
    return re.sub(rf"^({words})\b", lambda m: m[1].lower(), text)
