"""Tables of company figures and the investment brief that states them (the task *brief*).

The figures are chosen so that every difference and percentage is a whole number. The style named
in the table fixes the wording, so a brief has one right text; a fact is one number (or word) of
that text.
"""

import random
from dataclasses import dataclass

COMPANIES = [
    "Nova Foods",
    "Delta Steel",
    "Orion Motors",
    "Alpine Water",
    "Blue Harbor",
    "Cedar Bank",
    "Polar Energy",
    "Metro Media",
    "Summit Tools",
    "Green Valley",
]
_RISKS = {
    "food": "rising prices for grain",
    "energy": "a fall in the oil price",
    "retail": "weak demand in the shops",
    "software": "strong rivals in the market",
    "transport": "the cost of fuel",
}

_STYLES = {
    "formal": (
        "{name} reported revenue of ${revenue} million in {year}, {moved} from ${before} million in the year before. "
        "This is a change of ${change} million or {growth}%.\n"
        "Costs came to ${costs} million, which leaves a profit of ${profit} million and a margin of {margin}%. "
        "The profit of the year before was ${earned} million, so profit {went} by ${gain} million.\n"
        "The main risk is {risk}. With growth {pace} and a margin {level}, we rate the shares as {rating}."
    ),
    "plain": (
        "In {year} the revenue of {name} was ${revenue} million, {moved} from ${before} million. "
        "The difference is ${change} million, which is {growth}%.\n"
        "After costs of ${costs} million the profit is ${profit} million, a margin of {margin}%. "
        "A year ago the profit was ${earned} million, so it {went} by ${gain} million.\n"
        "Investors should watch {risk}. Growth is {pace} and the margin is {level}: our view is {rating}."
    ),
}


@dataclass(frozen=True)
class Brief:
    """One task: `key` (the figures, which decide the split), prompt, reference text and the facts
    by name.
    """

    key: str
    prompt: str
    answer: str
    style: str
    facts: dict[str, str]


def _figures(rng: random.Random) -> tuple[int, int, int, int]:
    while True:
        before = rng.choice([20, 40, 50, 60, 80, 100, 120, 150, 160, 200])
        growth = rng.choice([-50, -40, -30, -25, -20, -10, -5, 5, 10, 15, 20, 25, 30, 40, 50, 60])
        margin = rng.choice([5, 10, 15, 20, 25, 30, 40, 50])
        revenue = before * (100 + growth) // 100
        if before * growth % 100 == 0 and revenue * margin % 100 == 0:
            return before, growth, margin, revenue


def draw_brief(rng: random.Random) -> Brief:
    """Draws one table with its brief; the same state of `rng` gives the same one."""
    before, growth, margin, revenue = _figures(rng)
    profit = revenue * margin // 100
    earned = rng.choice([n for n in range(max(1, profit - 15), profit + 16) if n != profit])
    sector, style = rng.choice(list(_RISKS)), rng.choice(list(_STYLES))
    good = (growth >= 10) + (margin >= 20)
    facts = {
        "name": rng.choice(COMPANIES),
        "year": str(rng.randint(2015, 2029)),
        "revenue": str(revenue),
        "moved": "up" if growth > 0 else "down",
        "before": str(before),
        "change": str(abs(revenue - before)),
        "growth": str(abs(growth)),
        "costs": str(revenue - profit),
        "profit": str(profit),
        "margin": str(margin),
        "earned": str(earned),
        "went": "rose" if profit > earned else "fell",
        "gain": str(abs(profit - earned)),
        "risk": _RISKS[sector],
        "pace": "strong" if growth >= 10 else "weak",
        "level": "high" if margin >= 20 else "low",
        "rating": ["sell", "hold", "buy"][good],
    }
    prompt = (
        f"Company: {facts['name']}\nYear: {facts['year']}\nRevenue: {revenue}\nRevenue before: {before}\n"
        f"Costs: {revenue - profit}\nProfit before: {earned}\nSector: {sector}\nStyle: {style}\nWrite a brief."
    )
    return Brief(
        f"brief {before} {revenue} {profit} {earned}",
        prompt,
        _STYLES[style].format(**facts),
        style,
        facts,
    )


def facts_right(brief: Brief, text: str) -> float:
    """Share of the facts of `brief` that `text` states, each in its own clause of the style (0 to
    1).
    """
    right = 0
    for name, value in brief.facts.items():
        before, after = _STYLES[brief.style].split("{" + name + "}", 1)
        # The literal words beside the slot say which fact it is; the neighbouring slots may hold
        # anything.
        left, follow = before.rsplit("}", 1)[-1][-24:], after.split("{", 1)[0][:12]
        right += left + value + follow in text
    return right / len(brief.facts)
