"""English word problems of one to four steps, with written-out answers (the task *math*).

A problem is drawn as a skeleton (family, wording, numbers) and then dressed with names and
objects. The split (train, dev or test) is a hash of the skeleton alone, so no two splits share a
problem even under other names.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

NAMES = [
    ("Tom", "he"),
    ("Ben", "he"),
    ("Sam", "he"),
    ("Leo", "he"),
    ("Max", "he"),
    ("Omar", "he"),
    ("Ravi", "he"),
    ("Paul", "he"),
    ("Anna", "she"),
    ("Mia", "she"),
    ("Lucy", "she"),
    ("Nina", "she"),
    ("Sara", "she"),
    ("Emma", "she"),
    ("Ling", "she"),
    ("Rosa", "she"),
]
OBJECTS = [
    "apples",
    "books",
    "coins",
    "cards",
    "pens",
    "stamps",
    "shells",
    "eggs",
    "cups",
    "balls",
    "toys",
    "cakes",
]


@dataclass(frozen=True)
class Problem:
    """One word problem: `key` (the skeleton that decides the split), question, worked answer,
    final number.
    """

    key: str
    question: str
    answer: str
    result: int


class _Draw:
    """Random choices of one problem; what is chosen through it becomes part of the skeleton."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.key: list[object] = []

    def number(self, low: int, high: int) -> int:
        value = self.rng.randint(low, high)
        self.key.append(value)
        return value

    def wording(self, options: list[str]) -> str:
        index = self.rng.randrange(len(options))
        self.key.append(index)
        return options[index]


_START = ["{N} has {a} {o}.", "{N} starts with {a} {o}.", "There are {a} {o} in the box of {N}."]
_MORE = [
    "Then {p} buys {b} more.",
    "{F} gives {N} {b} more {o}.",
    "Later {p} finds {b} {o}.",
    "On Monday {p} gets {b} new {o}.",
]
_LESS = [
    "Then {p} gives {b} to {F}.",
    "Later {p} loses {b} of them.",
    "{N} sells {b} {o}.",
    "On Friday {b} of the {o} break.",
]
_TIMES = ["After a week {p} has {b} times as many.", "Then the number of {o} grows {b} times."]
_SHARE = [
    "Then {p} shares them equally in {b} bags and keeps one bag.",
    "{N} splits the {o} in {b} equal parts and takes one part.",
]
_NOW = [
    "How many {o} does {N} have now?",
    "How many {o} are there in the end?",
    "What is the number of {o} now?",
]


def _chain(draw: _Draw, steps: int) -> tuple[list[str], list[str], int]:
    value = draw.number(3, 40)
    text, lines = [draw.wording(_START).replace("{a}", str(value))], []
    for _ in range(steps):
        factors = [k for k in range(2, 6) if value * k <= 99]
        parts = [k for k in range(2, 10) if value % k == 0 and value // k > 1]
        kinds = ["more"] * (3 if value < 95 else 0) + ["less"] * (3 if value > 5 else 0)
        kinds += ["times"] * bool(factors) + ["share"] * bool(parts)
        kind = draw.rng.choice(kinds)
        draw.key.append(kind)
        if kind == "more":
            b = draw.number(2, min(40, 99 - value))
            words, line, new = _MORE, f"Add {b}: {value}+{b}={value + b}.", value + b
        elif kind == "less":
            b = draw.number(2, value - 2)
            words, line, new = _LESS, f"Take away {b}: {value}-{b}={value - b}.", value - b
        elif kind == "times":
            b = draw.rng.choice(factors)
            words, line, new = _TIMES, f"Times {b}: {value}*{b}={value * b}.", value * b
        else:
            b = draw.rng.choice(parts)
            words, line, new = _SHARE, f"Divide by {b}: {value}/{b}={value // b}.", value // b
        draw.key.append(b)
        text.append(draw.wording(words).replace("{b}", str(b)))
        lines.append(line)
        value = new
    return [*text, draw.wording(_NOW)], lines, value


def _shop(draw: _Draw, steps: int) -> tuple[list[str], list[str], int]:
    n, p = draw.number(2, 9), draw.number(2, 9)
    total = n * p
    text = [draw.wording(["{N} buys {n} {o} for ${x} each.", "{N} pays for {n} {o}, ${x} each."])]
    text[0] = text[0].replace("{n}", str(n)).replace("{x}", str(p))
    lines = [f"The {{o}} cost {n}*{p}={total} dollars."]
    if steps >= 3:
        m, q = draw.number(2, 5), draw.number(2, 4)
        other = m * q
        extra = draw.wording(["{P} also buys {n} {u} for ${x} each.", "The {n} {u} are ${x} each."])
        text.append(extra.replace("{n}", str(m)).replace("{x}", str(q)))
        lines.append(f"The {{u}} cost {m}*{q}={other} dollars.")
        lines.append(f"Together {total}+{other}={total + other} dollars.")
        total += other
    question = ["How much does {N} pay?", "How many dollars is that in all?"]
    if steps in (2, 4):
        paid = draw.number(total + 1, 99 if total < 98 else total + 3)
        text.append(
            draw.wording(["{P} has ${a}.", "{P} pays with ${a}."]).replace("{a}", str(paid))
        )
        lines.append(f"Left are {paid}-{total}={paid - total} dollars.")
        total = paid - total
        question = ["How much money is left?", "How much change does {p} get?"]
    return [*text, draw.wording(question)], lines, total


def _compare(draw: _Draw, steps: int) -> tuple[list[str], list[str], int]:
    first = draw.number(4, 30)
    text = [draw.wording(["{N} has {a} {o}.", "{N} owns {a} {o}."]).replace("{a}", str(first))]
    lines, values, last = [], [first], "{N}"
    for who in ["{F}", "{G}"][: 1 if steps <= 2 else 2]:
        value = values[-1]
        kind = draw.rng.choice(["more", "fewer", "times"] if value * 2 <= 60 else ["more", "fewer"])
        draw.key.append(kind)
        if kind == "more":
            b = draw.number(2, 20)
            phrase, line, new = f"{b} more {{o}} than", f"{value}+{b}={value + b}", value + b
        elif kind == "fewer":
            b = draw.number(2, value - 1) if value > 3 else 1
            phrase, line, new = f"{b} fewer {{o}} than", f"{value}-{b}={value - b}", value - b
        else:
            b = draw.number(2, 60 // value if value > 12 else 3)
            phrase, line, new = f"{b} times as many {{o}} as", f"{value}*{b}={value * b}", value * b
        text.append(f"{who} has {phrase} {last}.")
        lines.append(f"{who} has {line} {{o}}.")
        values.append(new)
        last = who
    if steps == 1:
        return [*text, "How many {o} does {F} have?"], lines, values[-1]
    total = values[0]
    for value in values[1:]:
        lines.append(f"Together {total}+{value}={total + value} {{o}}.")
        total += value
    return (
        [
            *text,
            draw.wording(["How many {o} do they have together?", "How many {o} is that in all?"]),
        ],
        lines,
        total,
    )


def _work(draw: _Draw, steps: int) -> tuple[list[str], list[str], int]:
    rate, hours = draw.number(2, 9), draw.number(2, 8)
    verb = draw.wording(["packs", "makes", "paints"])
    text, lines = [f"{{N}} {verb} {rate} {{o}} an hour."], []
    if steps == 1 or steps == 2:
        text.append(f"{{P}} works {hours} hours.")
    else:
        extra = draw.number(2, 10 - hours)
        text.append(f"{{P}} works {hours} hours on Monday and {extra} hours on Friday.")
        lines.append(f"That is {hours}+{extra}={hours + extra} hours.")
        hours += extra
    total = rate * hours
    lines.append(f"In {hours} hours {{p}} {verb} {hours}*{rate}={total} {{o}}.")
    question = "How many {o} is that?"
    if steps in (2, 3):
        b = draw.number(1, total - 1)
        text.append(
            draw.wording(["Then {b} of them break.", "{P} gives {b} of them to {F}."]).replace(
                "{b}", str(b)
            )
        )
        lines.append(f"Left are {total}-{b}={total - b} {{o}}.")
        total, question = total - b, "How many {o} are left?"
    elif steps == 4:
        have = draw.number(1, 99 - total) if total < 98 else 1
        b = draw.number(1, min(have + total - 1, 50))
        text.append(f"{{P}} already had {have} {{o}} and sells {b} {{o}}.")
        lines.append(f"With the old ones {total}+{have}={total + have} {{o}}.")
        lines.append(f"Left are {total + have}-{b}={total + have - b} {{o}}.")
        total, question = total + have - b, "How many {o} are left?"
    return [*text, question], lines, total


_FAMILIES: dict[str, Callable[[_Draw, int], tuple[list[str], list[str], int]]] = {
    "chain": _chain,
    "shop": _shop,
    "compare": _compare,
    "work": _work,
}


def draw_problem(rng: random.Random) -> Problem:
    """Draws one problem; the same state of `rng` gives the same problem."""
    draw = _Draw(rng)
    family = rng.choice(["chain", "chain", "shop", "compare", "work"])
    steps = rng.randint(1, 4)
    text, lines, result = _FAMILIES[family](draw, steps)
    people = rng.sample(NAMES, 3)
    thing, other = rng.sample(OBJECTS, 2)
    dress = {"N": people[0][0], "F": people[1][0], "G": people[2][0], "o": thing, "u": other}
    dress |= {"p": people[0][1], "P": people[0][1].capitalize()}
    question = " ".join(text).format(**dress)
    answer = "\n".join([*lines, f"#### {result}"]).format(**dress)
    return Problem(f"math {family} {steps} {draw.key}", question, answer, result)


def final_number(text: str) -> int | None:
    """The number after the last `####` of an answer, or None."""
    found = re.findall(r"####\s*(-?\d+)", text)
    return int(found[-1]) if found else None
