"""The rules of the decoders as their papers say them, in plain loops over one window."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dinfer.step import NUM_TOP

VOCAB = 12


@dataclass
class Seen:
    """One window at one step, in plain lists: distributions p[i][v], which are masked, tokens."""

    p: list[list[float]]
    masked: list[int]
    held: list[int]
    given: set[int]
    noise: list[float]
    opened: int
    step: int
    memory: dict[str, Any]

    def token(self, i: int) -> int:
        return max(range(VOCAB), key=lambda v: (self.p[i][v], -v))

    def c(self, i: int) -> float:
        return self.p[i][self.token(i)]

    def h(self, i: int) -> float:
        return -sum(q * math.log(q) for q in self.p[i] if q > 0)

    def margin(self, i: int) -> float:
        first, second = sorted(self.p[i], reverse=True)[:2]
        return first - second

    def sorted(self, score: Callable[[int], float]) -> list[int]:
        return sorted(self.masked, key=lambda i: (-score(i), i))

    @property
    def editable(self) -> list[int]:
        return [i for i in range(len(self.p)) if i not in self.masked and i not in self.given]


@dataclass
class Done:
    """What a rule does: tokens to write by position, positions to take back, stays open."""

    tokens: dict[int, int]
    back: set[int] = field(default_factory=set)
    open: bool = False


Rule = Callable[[Seen], Done]


def commit(seen: Seen, chosen: Any) -> Done:
    return Done({i: seen.token(i) for i in chosen})


def threshold(w: Seen) -> Done:
    return commit(w, {i for i in w.masked if w.c(i) >= 0.5} | {w.sorted(w.c)[0]})


def fixed(w: Seen) -> Done:
    share = w.opened // 4 + (w.step < w.opened % 4)
    return commit(w, w.sorted(w.c)[: max(1, share)])


def factor(w: Seen) -> Done:
    """Largest n with c_j >= 1 - 1.4 / (j + 1) for all of its ranks 2 <= j <= n."""
    order, n = w.sorted(w.c), 1
    while n < len(order) and w.c(order[n]) >= 1 - 1.4 / (n + 2):
        n += 1
    return commit(w, order[:n])


def entropy(w: Seen) -> Done:
    """Largest prefix U, by rising entropy, with sum(U) - max(U) <= 0.8."""
    order = w.sorted(lambda i: -w.h(i))
    for n in range(len(order), 0, -1):
        chosen = [w.h(i) for i in order[:n]]
        if n == 1 or sum(chosen) - max(chosen) <= 0.8:
            return commit(w, order[:n])
    raise AssertionError


def entropy_threshold(w: Seen) -> Done:
    first = min(w.masked)
    cost = {i: w.h(i) + 0.05 * (i - first) for i in w.masked}
    return commit(w, {i for i in w.masked if cost[i] <= 0.9} | {min(cost, key=lambda i: cost[i])})


def hierarchy(w: Seen) -> Done:
    chosen = {i for i in w.masked if w.c(i) > 0.8} | {w.sorted(w.c)[0]}
    run: list[int] = []
    for i in range(len(w.p) + 1):
        if i in w.masked:
            run.append(i)
        elif run:
            head = max(run, key=lambda j: (w.c(j), -j))
            chosen |= {head} if w.c(head) > 0.3 else set()
            run = []
    return commit(w, chosen)


def localleap(w: Seen) -> Done:
    anchors = [i for i in w.masked if w.c(i) >= 0.7]
    near = {j for j in w.masked for a in anchors if abs(j - a) <= 2 and w.c(j) >= 0.4}
    return commit(w, near | set(anchors) | {w.sorted(w.c)[0]})


def top(p: list[float]) -> list[int]:
    return sorted(range(VOCAB), key=lambda v: (-p[v], v))[:NUM_TOP]


def klass(w: Seen) -> Done:
    rest = w.memory.setdefault("rest", {})
    old = w.memory.get("p")
    for i in w.masked:
        calm = False
        if old is not None and i in old:
            now, before = top(w.p[i]), top(old[i])
            shared = [v for v in now if v in before]
            a = [w.p[i][v] for v in shared]
            b = [old[i][v] for v in shared]
            a.append(1 - sum(a))
            b.append(1 - sum(b))
            calm = sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0) < 0.4
        rest[i] = rest.get(i, 0) + 1 if calm else 0
    w.memory["p"] = {i: w.p[i] for i in w.masked}
    sure = {i for i in w.masked if rest[i] >= 1 and w.c(i) > 0.3}
    return commit(w, sure | {w.sorted(w.c)[0]})


def credit(w: Seen) -> Done:
    """With the whole block x vocabulary matrix of the paper."""
    matrix = w.memory.setdefault("C", [[0.0] * VOCAB for _ in w.p])
    tokens, confidence = {}, {}
    for i in w.masked:
        matrix[i] = [0.5 * x for x in matrix[i]]
        matrix[i][w.token(i)] += w.c(i) ** 0.2
        z = [math.log(q) + 3 * math.log(1 + x) for q, x in zip(w.p[i], matrix[i], strict=True)]
        total = sum(map(math.exp, z))
        tokens[i] = max(range(VOCAB), key=lambda v: z[v])
        confidence[i] = math.exp(z[tokens[i]]) / total
    best = max(w.masked, key=lambda i: (confidence[i], -i))
    chosen = {i for i in w.masked if confidence[i] >= 0.7} | {best}
    return Done({i: tokens[i] for i in chosen})


def slowfast(w: Seen) -> Done:
    end = w.memory.get("end", -1)
    inside = [i for i in w.masked if i <= end]
    eligible = inside or w.masked
    best = max(eligible, key=lambda i: (w.c(i), -i))
    if not inside:
        estimates = w.memory.setdefault("estimates", [])
        estimates.append(max((i for i in w.masked if w.c(i) >= 0.3), default=min(w.masked)))
        w.memory["end"] = -1
        deviation = abs(estimates[-1] - estimates[-2]) / 2 if len(estimates) > 1 else math.inf
        if deviation < 1 or len(estimates) == 5:
            w.memory["end"], w.memory["estimates"] = estimates[-1], []
    return commit(w, {i for i in eligible if w.c(i) >= 0.6} | {best})


def dream(w: Seen, score: Callable[[int], float], steps: int = 4) -> Done:
    times = [1 + (1e-3 - 1) * k / steps for k in range(steps + 1)]
    if w.step >= steps - 1:
        return commit(w, w.masked)
    t, s = times[w.step], times[w.step + 1]
    return commit(w, w.sorted(score)[: max(1, int(len(w.masked) * (1 - s / t)))])


def wino(w: Seen) -> Done:
    last = w.memory.get("last", 1)
    room = min(max(int(0.5 * len(w.masked)), 1), 4)
    order = w.sorted(w.c)
    chosen = {i for i in order[:room] if w.c(i) > 0.3} | {order[0]}
    weak = sorted(w.editable, key=lambda i: (w.p[i][w.held[i]], i))
    weak = [i for i in weak if w.p[i][w.held[i]] < 0.6][: last - 1]
    w.memory["last"] = len(chosen)
    return Done({i: w.token(i) for i in chosen}, set(weak))


def remdm(w: Seen) -> Done:
    """The cap rule: sigma = min(eta, (1 - alpha_s) / alpha_t)."""
    share = w.opened // 5 + (w.step < w.opened % 5)
    quota = min(len(w.masked), max(1, share))
    held = w.editable
    n = len(w.masked) + len(held)
    sigma = min(1.0, (1 - (len(held) + quota) / n) / (len(held) / n)) if held else 0.0
    lots = sorted((i for i in held if w.noise[i] < sigma), key=lambda i: (w.noise[i], i))
    back = lots[: len(w.masked) - quota]
    return Done(commit(w, w.sorted(w.c)[: quota + len(back)]).tokens, set(back))


def edit(w: Seen) -> Done:
    tokens = {}
    if w.masked:
        chosen = {i for i in w.masked if w.c(i) > 0.6} | {w.sorted(w.c)[0]}
        tokens = {i: w.token(i) for i in chosen}
    edits = {i for i in w.editable if w.token(i) != w.held[i] and w.c(i) > 0.15}
    full = not w.masked
    w.memory["rounds"] = w.memory.get("rounds", 0) + full
    filled = not set(w.masked) - set(tokens)
    stays = filled and w.memory["rounds"] < 2 and (not full or bool(edits))
    return Done(tokens | {i: w.token(i) for i in edits}, open=stays)


RULES: dict[str, Rule] = {
    "fixed:steps=4": fixed,
    "threshold:threshold=0.5": threshold,
    "factor:factor=1.4": factor,
    "entropy:bound=0.8": entropy,
    "entropy_threshold:threshold=0.9:slope=0.05": entropy_threshold,
    "hierarchy:threshold=0.8:low=0.3": hierarchy,
    "localleap:anchor=0.7:threshold=0.4:radius=2": localleap,
    "klass:threshold=0.3:divergence=0.4:steps=1": klass,
    "credit:threshold=0.7:alpha=3:beta=0.5": credit,
    "slowfast:threshold=0.6:explore=0.3:steps=5": slowfast,
    "dream:steps=4:ranking=maskgit:filtered=false": lambda w: dream(w, w.c),
    "dream:steps=4:ranking=margin:filtered=false": lambda w: dream(w, w.margin),
    "dream:steps=4:ranking=entropy:filtered=false": lambda w: dream(w, lambda i: -w.h(i)),
    "wino:threshold=0.3:back=0.6:share=0.5:least=1:most=4": wino,
    "remdm:steps=5:eta=1": remdm,
    "edit:threshold=0.6:edit=0.15:rounds=2": edit,
}
