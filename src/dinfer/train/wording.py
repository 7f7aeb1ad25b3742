"""Sentences from a small grammar: `[a|b]` chooses, `{x}` is filled in, `~verb` agrees with its
subject.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_IRREGULAR = {"has": "have", "is": "am", "was": "was", "does": "do", "goes": "go"}


def expand(rng: random.Random, grammar: str) -> str:
    """One wording of a grammar: each `[a|b|c]` becomes one of its alternatives, the inner ones
    first. Spaces that an empty alternative leaves behind are dropped.
    """
    while found := _BRACKETS.search(grammar):
        chosen = rng.choice(found[1].split("|"))
        grammar = grammar[: found.start()] + chosen + grammar[found.end() :]
    return re.sub(r"\s+([,.?]|$)", r"\1", re.sub(r" {2,}", " ", grammar)).strip()


def wordings(grammar: str) -> int:
    """How many ways there are through the choices of a grammar."""
    sums = [0]
    product = [1]
    for mark in grammar:
        if mark == "[":
            sums.append(0)
            product.append(1)
        elif mark == "|" and len(sums) > 1:
            sums[-1] += product[-1]
            product[-1] = 1
        elif mark == "]":
            inner = sums.pop() + product.pop()
            product[-1] *= inner
    return product[0]


def in_words(number: int) -> str:
    """A number of 0 to 199 in English words; others in digits."""
    if number < 20:
        return SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return TENS[tens - 2] + (f"-{SMALL[rest]}" if rest else "")
    if number < 200:
        return "a hundred" + (f" and {in_words(number - 100)}" if number > 100 else "")
    return str(number)


def plural(noun: str) -> str:
    """Plural of a regular English noun (of its last word)."""
    if re.search(r"(s|x|z|ch|sh|tomato|potato)$", noun):
        return noun + "es"
    return re.sub(r"([^aeiou])y$", r"\1ie", noun) + "s"


def first_person(verb: str) -> str:
    """`buys` as it stands after *I*: `buy`."""
    if verb in _IRREGULAR:
        return _IRREGULAR[verb]
    if verb.endswith("ies"):
        return verb[:-3] + "y"
    return verb[: -2 if re.search(r"(ss|x|z|ch|sh)es$", verb) else -1]


@dataclass(frozen=True)
class Person:
    """Who acts in a problem: the name and its pronouns. Of *I*, verbs are in the first person."""

    name: str
    subject: str
    possessive: str
    object: str


def people(names: str, subject: str, possessive: str, object: str) -> list[Person]:
    """Persons of the same pronouns, from names with commas between them."""
    return [Person(name, subject, possessive, object) for name in names.split(", ")]


def agree(text: str, actor: Person) -> str:
    """Puts the verbs marked `~` into the person of the actor, and those behind *I*."""
    if actor.name != "I":
        return text.replace("~", "")
    text = re.sub(r"~(\w+)", lambda m: first_person(m[1]), text).replace("is I ", "am I ")
    text = re.sub(r"\bI (also )?(\w+s)\b", lambda m: f"I {m[1] or ''}{first_person(m[2])}", text)
    return text.replace("I's", "my")


def fill(text: str, slots: Mapping[str, str]) -> str:
    """Fills in `{x}`."""
    return re.sub(r"\{(\w+)\}", lambda m: slots[m[1]], text)


def sentence(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


_SYLLABLES = [
    "ba",
    "be",
    "bi",
    "bo",
    "bra",
    "bri",
    "ca",
    "ce",
    "co",
    "cra",
    "da",
    "de",
    "di",
    "do",
    "dra",
    "el",
    "en",
    "fa",
    "fe",
    "fi",
    "flo",
    "ga",
    "ge",
    "gla",
    "go",
    "gra",
    "ha",
    "he",
    "hi",
    "ja",
    "jo",
    "ka",
    "ke",
    "ki",
    "kra",
    "la",
    "le",
    "li",
    "lo",
    "lu",
    "ma",
    "me",
    "mi",
    "mo",
    "na",
    "ne",
    "ni",
    "no",
    "or",
    "pa",
    "pe",
    "pi",
    "po",
    "pra",
    "qua",
    "ra",
    "re",
    "ri",
    "ro",
    "sa",
    "se",
    "si",
    "so",
    "sta",
    "ste",
    "ta",
    "te",
    "ti",
    "to",
    "tra",
    "u",
    "va",
    "ve",
    "vi",
    "vo",
    "wa",
    "we",
    "wi",
    "xe",
    "ya",
    "yo",
    "za",
    "ze",
    "zi",
    "zo",
]
_ENDINGS = [
    "n",
    "r",
    "s",
    "l",
    "x",
    "m",
    "t",
    "ck",
    "nd",
    "rt",
    "st",
    "th",
    "sh",
    "ne",
    "ra",
    "na",
    "ta",
    "ro",
    "ly",
    "by",
    "ton",
    "ville",
    "mann",
    "ger",
    "ia",
    "us",
    "io",
]


def invented_name(rng: random.Random) -> str:
    """A name that probably nobody has used: it teaches copying, as no list could."""
    core = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3)))
    return sentence(core + rng.choice(_ENDINGS))
