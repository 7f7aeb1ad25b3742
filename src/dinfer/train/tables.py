"""Company figures in any layout, and a short brief that states them (the task *tables*).

A table is lines, bullets, CSV, Markdown or prose, its rows in any order and under many headings, with
rows that nobody asked about; the company's name is any name. The brief copies name, year and figures,
and works the differences out where it can be checked: `120-80=40`.
"""

import random
import re
from dataclasses import dataclass

from dinfer.train.wording import expand, fill, invented_name

HEADINGS = {
    "revenue": "Revenue|Sales|Turnover|Total revenue|Net sales|Revenues|Income from sales|Revenue this year|Sales this year|Takings|Revenue {year}|Sales {year}",
    "before": "Revenue before|Revenue last year|Prior-year revenue|Sales last year|Previous revenue|Previous year's sales|Revenue a year ago|Last year's turnover|Sales the year before|Revenue {last}|Sales {last}|Turnover {last}",
    "costs": "Costs|Expenses|Total costs|Operating costs|Spending|Outgoings|Total expenses|Cost base|Costs {year}|Operating expenses",
    "earned": "Profit before|Profit last year|Previous profit|Prior-year profit|Profit a year ago|Last year's profit|Profit {last}|Earnings last year",
}
_ASIDES = "Employees|Staff|Founded|Shops|Offices|Plants|Customers (thousands)|Patents|Countries|Share price|Debt|Head count"
_UNITS = {
    "": ("{x}",),
    "million dollars": (
        "${x} million",
        "${x}m",
        "{x} million dollars",
        "USD {x} million",
        "$ {x} mn",
    ),
    "million euros": ("€{x} million", "€{x}m", "{x} million euros", "EUR {x} million", "{x} m€"),
    "million pounds": ("£{x} million", "£{x}m", "{x} million pounds", "GBP {x} million"),
    "thousand dollars": ("${x}k", "${x},000", "{x} thousand dollars"),
}
_FORMS = "Ltd|Inc|Group|AG|GmbH|Co|Holdings|plc|Corp|& Sons|Bank|Foods|Motors|Energy|Media|Tools|Systems|Partners|Labs|Works|Textiles|Logistics|Steel|Air|Pharma|Studio|Brewery|Bakery|Books|Telecom|Solar"
_FIRST = (
    "North|South|Red|Golden|Silver|Bright|River|Lake|Stone|Green|Blue|Sun|Moon|Iron|Swift|First|United|General|Old|New|"
    "Royal|Pacific|Atlantic|Baltic|Nordic|Alpine|Urban|Global|Quick|Clear|Happy|Wild|Grand|Little|Fox|Bear|Eagle|Oak|Maple"
)
_NAME = (
    "Company|Name|Firm|Business|Issuer|Organisation|Company name",
    "Year|Fiscal year|Period|Financial year|FY|Reporting year",
)
_ASK = (
    "[Write|Please write|Draft|Give me] [a|the|a short] [brief|summary|report|note][ about this company| on these figures| for investors|].|Summarise [this|the figures|these numbers].|"
    "[What do these numbers say?|Sum this up.|Tell me how the company did.|How did the company do?]|Write a brief.|Brief, please."
)
_PROSE = {
    "revenue": "[it|the company|the firm] [took in|had sales of|made revenue of|sold goods for] {revenue} [in {year}|that year|]|revenue [was|came to|reached|stood at] {revenue}|sales [were|came to|reached] {revenue}",
    "before": "[the year before it was|after] {before} [a year earlier|in {last}]|in {last} [revenue|it] was {before}|the year before, [sales|revenue] [were|had been|was] {before}",
    "costs": "[costs|expenses] [were|came to|added up to|reached|amounted to] {costs}|it spent {costs}|running the business cost {costs}",
    "earned": "[profit|the profit] [last year|in {last}|the year before] [was|had been] {earned}|it had earned {earned} [in {last}|the year before]",
}


@dataclass(frozen=True)
class Table:
    """One table: `key` (the figures, which decide the split), prompt, brief, and the facts by name."""

    key: str
    prompt: str
    answer: str
    facts: dict[str, str]


def company(rng: random.Random) -> str:
    """A company's name: of words, invented, of initials, or of a person."""
    kind = rng.random()
    first = rng.choice(_FIRST.split("|"))
    form = rng.choice(_FORMS.split("|"))
    if kind < 0.2:
        return f"{first} {form}"
    if kind < 0.6:
        return f"{invented_name(rng)} {form}"
    if kind < 0.75:
        return invented_name(rng)
    if kind < 0.85:
        return f"{invented_name(rng)} {invented_name(rng)} {form}"
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))
    return f"{letters} {form}" if kind < 0.95 else f"{invented_name(rng)} & {invented_name(rng)}"


def brief_of(facts: dict[str, str]) -> str:
    """The brief of these facts; lines whose figures are not there are left out."""
    unit = f" {facts['unit']}" if facts["unit"] else ""
    lines = [f"In {facts['year']}, {facts['name']} had revenue of {facts['revenue']}{unit}."]
    if "before" in facts:
        high, low = sorted((int(facts["revenue"]), int(facts["before"])), reverse=True)
        lines.append(
            f"That is {facts['moved']} from {facts['before']}{unit}: {high}-{low}={facts['change']}."
        )
    if "costs" in facts:
        lines.append(
            f"Costs were {facts['costs']}{unit}, so the {facts['result']} is "
            + "{}-{}={}{}.".format(
                *sorted((int(facts["revenue"]), int(facts["costs"])), reverse=True),
                facts["profit"],
                unit,
            )
        )
    if "earned" in facts:
        lines.append(f"The profit of the year before was {facts['earned']}{unit}.")
    return "\n".join(lines)


def table_facts(
    name: str,
    year: int,
    unit: str,
    revenue: int,
    before: int | None = None,
    costs: int | None = None,
    earned: int | None = None,
) -> dict[str, str]:
    """All facts that follow from the figures of a table, by name."""
    facts = {"name": name, "year": str(year), "unit": unit, "revenue": str(revenue)}
    if before is not None:
        facts |= {"moved": "up" if revenue > before else "down", "before": str(before)}
        facts["change"] = str(abs(revenue - before))
    if costs is not None:
        facts |= {"costs": str(costs), "result": "profit" if revenue > costs else "loss"}
        facts["profit"] = str(abs(revenue - costs))
    if earned is not None:
        facts["earned"] = str(earned)
    return facts


def draw_table(rng: random.Random) -> Table:
    """Draws one table with its brief; the same state of `rng` gives the same one."""
    high = rng.choice([99, 200, 400, 999])
    revenue = rng.randint(12, high)
    figures = {"revenue": revenue}
    if rng.random() < 0.85:
        figures["before"] = _other(rng, revenue, 0.6, 1.5)
    if rng.random() < 0.85:
        figures["costs"] = _other(rng, revenue, 0.4, 1.15)
    if rng.random() < 0.4:
        figures["earned"] = rng.randint(2, max(3, revenue // 2))
    unit = rng.choice(["", "", *list(_UNITS)[1:]])
    year = rng.randint(1995, 2035)
    facts = table_facts(company(rng), year, unit, **figures)
    prompt = _laid_out(rng, facts, {x: str(n) for x, n in figures.items()})
    return Table(f"tables {sorted(figures.items())}", prompt, brief_of(facts), facts)


def _other(rng: random.Random, revenue: int, least: float, most: float) -> int:
    """Another figure near the revenue, never the same."""
    number = revenue
    while number == revenue:
        number = rng.randint(max(2, int(revenue * least)), int(revenue * most) + 3)
    return number


def _laid_out(rng: random.Random, facts: dict[str, str], figures: dict[str, str]) -> str:
    """The prompt: the table in one of its layouts, what is wanted before or behind it."""
    years = {"year": facts["year"], "last": str(int(facts["year"]) - 1)}
    pattern = rng.choice(_UNITS[facts["unit"]])
    amounts = {x: pattern.replace("{x}", n) for x, n in figures.items()}
    if rng.random() < 0.25:
        body = _prose(rng, facts, amounts, years)
    else:
        rows = [(fill(rng.choice(HEADINGS[x].split("|")), years), n) for x, n in amounts.items()]
        if rng.random() < 0.3:
            rows.append((rng.choice(_ASIDES.split("|")), str(rng.randint(2, 999))))
        rng.shuffle(rows)
        head = [rng.choice(_NAME[0].split("|")), rng.choice(_NAME[1].split("|"))]
        rows = [(head[0], facts["name"]), (head[1], facts["year"]), *rows]
        if rng.random() < 0.3:
            rng.shuffle(rows)
        body = _as_table(rng, rows, facts)
    ask = expand(rng, f"[{_ASK}]")
    return rng.choice(
        [f"{body}\n{ask}", f"{body}\n{ask}", f"{body}\n\n{ask}", f"{ask}\n{body}", body]
    )


def _as_table(rng: random.Random, rows: list[tuple[str, str]], facts: dict[str, str]) -> str:
    style = rng.choice(["lines", "lines", "bullets", "csv", "csv across", "markdown", "titled"])
    if style == "csv":
        mark = rng.choice([",", ", ", ";", "\t"])
        return "\n".join(mark.join(row) for row in rows)
    if style == "csv across":
        mark = rng.choice([",", ", ", ";", "\t", " | "])
        return "\n".join(mark.join(row[part] for row in rows) for part in (0, 1))
    if style == "markdown":
        lines = [f"| {name} | {value} |" for name, value in rows]
        return "\n".join([*lines[:1], *["|---|---|"] * rng.randint(0, 1), *lines[1:]])
    if style == "titled":
        title = expand(
            rng,
            f"[{facts['name']} {facts['year']}|{facts['name']}, {facts['year']}|{facts['name']} ({facts['year']})|{facts['name']} - {facts['year']}]",
        )
        rows = [row for row in rows if row[1] not in (facts["name"], facts["year"])]
        return "\n".join([title, *(f"{name}: {value}" for name, value in rows)])
    mark = rng.choice([": ", ": ", " = ", " - ", " "]) if style == "lines" else ": "
    bullet = rng.choice(["- ", "* ", "• "]) if style == "bullets" else ""
    return "\n".join(f"{bullet}{name}{mark}{value}" for name, value in rows)


def _prose(
    rng: random.Random, facts: dict[str, str], amounts: dict[str, str], years: dict[str, str]
) -> str:
    slots = {**amounts, **years, "name": facts["name"]}
    opening = expand(
        rng,
        "[This is about {name} in {year}|Here are the {year} figures of {name}|{name} [had|closed|finished] [the year|its year] {year}|{name} reports for {year}|In {year}, {name} did business as follows|{name}, {year}]",
    )
    parts = [expand(rng, f"[{_PROSE[x]}]") for x in amounts]
    link = rng.choice([". ", ". ", ", ", "; "])
    parts = [opening, *parts]
    if link == ". ":
        parts = [part[:1].upper() + part[1:] for part in parts]
    return fill(link.join(parts) + ".", slots)


def table_facts_right(table: Table, text: str) -> dict[str, bool]:
    """Which facts of a table a brief states: each in its own line of the brief's form."""
    found: dict[str, str] = {}
    unit = r"(?: (?P<unit>[a-z ]+?))?"
    patterns = (
        rf"In (?P<year>\d+), (?P<name>.+) had revenue of (?P<revenue>\d+){unit}\.",
        r"That is (?P<moved>\w+) from (?P<before>\d+)[a-z ]*: \d+-\d+=(?P<change>\d+)\.",
        r"Costs were (?P<costs>\d+)[a-z ]*, so the (?P<result>\w+) is \d+-\d+=(?P<profit>\d+)",
        r"The profit of the year before was (?P<earned>\d+)",
    )
    for pattern in patterns:
        if match := re.search(pattern, text):
            found |= {name: value or "" for name, value in match.groupdict().items()}
    return {name: found.get(name) == value for name, value in table.facts.items()}
