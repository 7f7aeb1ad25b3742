"""What other requests cost a request: the wait for its first text, and how much longer it takes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dinfer.bench.machine import Timing
from dinfer.bench.traffic import Ask, Load, Run, Served
from dinfer.request import SamplingParams

EVERY = 8
"""One request of so many is a long one."""


def mixed(texts: Sequence[str], params: SamplingParams, long_tokens: int) -> list[Ask]:
    """Many short requests and a few long ones, which go on to their last token."""
    long = replace(params, max_tokens=long_tokens, ignore_eos=True)
    return [Ask(text, long if is_long(number) else params) for number, text in enumerate(texts)]


def is_long(number: int) -> bool:
    """Whether a request of the mix is a long one."""
    return number % EVERY == EVERY // 2


@dataclass(frozen=True)
class Rounds:
    """The same requests one at a time and `at_once` at a time, once in each round."""

    at_once: int
    alone: list[Served]
    among: list[Served]

    def figures(self) -> dict[str, Any]:
        """Waits, their ratio, and the slowdowns: seconds among others over seconds alone.

        The first `at_once` requests all come in the same moment, so they are told apart from those
        that come while at_once - 1 others are being answered. `fairness` is Jain's index of the
        slowdowns (Jain, Chiu and Hawe 1984): 1 where all are equal.
        """
        alone = Timing.of([answer.first for run in self.alone for answer in run.answers])
        burst = Timing.of([a.first for run in self.among for a in run.answers[: self.at_once]])
        among = Timing.of([a.first for run in self.among for a in run.answers[self.at_once :]])
        slower = self._slowdowns()
        every = [x for values in slower.values() for x in values]
        return {
            "seconds_to_first_text_alone": asdict(alone),
            "seconds_to_first_text_among_others": asdict(among),
            "seconds_to_first_text_all_at_once": asdict(burst),
            "first_text_ratio": among.median / alone.median,
            "first_text_ratio_p95": among.p95 / alone.p95,
            **{name: asdict(Timing.of(values)) for name, values in slower.items()},
            "fairness": sum(every) ** 2 / (len(every) * sum(x * x for x in every)),
        }

    def _slowdowns(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"slowdown_of_short": [], "slowdown_of_long": []}
        for alone, among in zip(self.alone, self.among, strict=True):
            pairs = zip(alone.answers, among.answers, strict=True)
            for number, (one, other) in enumerate(pairs):
                name = "slowdown_of_long" if is_long(number) else "slowdown_of_short"
                found[name].append(other.latency / one.latency)
        return found


def rounds(run: Run, asks: Sequence[Ask], at_once: int, repeats: int) -> Rounds:
    """Runs the requests alone and among others in turns, after a few to warm up."""
    run(asks[:at_once], Load(at_once))
    found = Rounds(at_once, [], [])
    for _ in range(repeats):
        found.alone.append(run(asks, Load()))
        found.among.append(run(asks, Load(at_once)))
    return found
