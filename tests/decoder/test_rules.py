"""Each decoder against the steps of its paper, written as a plain loop over one window at a time.

The decoder sees a batch of windows of different widths, and the loop one window; both go through
the same random distributions until nothing is masked.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dinfer.registry import build
from dinfer.step import TOP, Proposal, WindowState

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
    return sorted(range(VOCAB), key=lambda v: (-p[v], v))[:TOP]


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


@dataclass
class Windows:
    """B windows with their canvases, as the engine would keep them."""

    widths: list[int]
    masked: Tensor
    given: Tensor
    held: Tensor
    open: list[bool]

    def proposal(self, p: Tensor, noise: Tensor) -> Proposal:
        ordered = p.sort(dim=2, descending=True, stable=True)
        return Proposal(
            tokens=ordered.indices[..., 0],
            confidence=ordered.values[..., 0],
            entropy=-(p * p.log()).sum(dim=2),
            margin=ordered.values[..., 0] - ordered.values[..., 1],
            noise=noise,
            top_tokens=ordered.indices[..., :TOP],
            top_probs=ordered.values[..., :TOP],
            editable=~self.masked & ~self.given,
            held=self.held,
            kept=p.gather(2, self.held[..., None])[..., 0],
        )


def begin(rng: torch.Generator, batch: int, width: int) -> Windows:
    widths = torch.randint(1, width + 1, (batch,), generator=rng).tolist()
    outside = torch.arange(width)[None] >= torch.tensor(widths)[:, None]
    given = (torch.rand(batch, width, generator=rng) < 0.2) | outside
    held = torch.randint(0, VOCAB, (batch, width), generator=rng)
    return Windows(widths, ~given, given, held, [bool(row.any()) for row in ~given])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name,limit", [("threshold", 0.7), ("hierarchy", 0.7)])
def test_equal_confidence(name: str, limit: float, strict: bool) -> None:
    """At the threshold itself, and of several best ones the leftmost."""
    rng, least = torch.Generator().manual_seed(6), torch.tensor(limit)
    values = torch.stack([least, least.nextafter(torch.tensor(2.0)), torch.tensor(0.25)])
    option = f":strict={strict}".lower() if name == "threshold" else ":low=0.2"
    decoder = build("decoder", f"{name}:threshold={limit}{option}")
    above = strict or name == "hierarchy"
    for _ in range(50):
        masked = torch.rand(4, 9, generator=rng) < 0.6
        confidence = values[torch.randint(0, 3, (4, 9), generator=rng)]
        proposal = Proposal(torch.zeros(4, 9, dtype=torch.int64), confidence)
        found = decoder.commit(proposal, masked, [WindowState(9)] * 4).mask
        for c, is_open, mask in zip(confidence, masked.tolist(), found, strict=True):
            free = [i for i in range(9) if is_open[i]]
            expected = {i for i in free if c[i] > least or (c[i] == least and not above)}
            runs = "".join(".m"[x] for x in is_open).split(".") if name == "hierarchy" else [free]
            at = 0
            for run in runs:
                places = free[at : at + len(run)]
                at += len(run)
                expected |= {max(places, key=lambda i: (float(c[i]), -i))} if places else set()
            assert set(mask.nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spec", RULES)
def test_rule(spec: str, seed: int) -> None:
    for heat in (0.3, 1.0, 2.0):
        follow(spec, seed, batch=1 + seed, width=7 + 2 * seed, heat=heat)


def follow(spec: str, seed: int, batch: int, width: int, heat: float) -> None:
    """Step for step what the loop does; windows that are done leave the batch, as they do in the
    engine, and every one comes to its end.
    """
    rng, decoder = torch.Generator().manual_seed(seed), build("decoder", spec)
    windows = begin(rng, batch, width)
    opened = windows.masked.sum(dim=1).tolist()
    states = [WindowState(opened=n) for n in opened]
    memories: list[dict[str, Any]] = [{} for _ in range(batch)]
    # What changes from step to step is little, so that decoders that look back find calm.
    base = torch.randn(batch, width, VOCAB, generator=rng)
    for step in range(40 * width):
        going = [b for b in range(batch) if windows.masked[b].any() or windows.open[b]]
        if step == 0:
            going = [b for b in range(batch) if windows.masked[b].any()]
        if not going:
            return
        base = base + 0.3 * torch.randn(base.shape, generator=rng)
        p = (heat * base).softmax(dim=2)
        noise = torch.rand(batch, width, generator=rng)
        proposal = windows.proposal(p, noise)
        part = Proposal(
            **{k: None if v is None else v[going] for k, v in vars(proposal).items()}  # type: ignore[arg-type]
        )
        done = decoder.commit(part, windows.masked[going], [states[b] for b in going])
        for row, b in enumerate(going):
            mask = windows.masked[b].nonzero()[:, 0].tolist()
            given = set(windows.given[b].nonzero()[:, 0].tolist())
            seen = Seen(
                p[b].double().tolist(),
                mask,
                windows.held[b].tolist(),
                given,
                noise[b].tolist(),
                opened[b],
                states[b].steps,
                memories[b],
            )
            expected = RULES[spec](seen)
            where = done.mask[row].nonzero()[:, 0].tolist()
            assert {i: int(done.tokens[row, i]) for i in where} == expected.tokens
            back = set() if done.back is None else set(done.back[row].nonzero()[:, 0].tolist())
            assert back == expected.back
            windows.open[b] = done.open is not None and bool(done.open[row])
            assert windows.open[b] == expected.open
            for i, token in expected.tokens.items():
                windows.held[b, i], windows.masked[b, i] = token, False
            windows.masked[b, list(back)] = True
            states[b].steps += 1
    raise AssertionError("does not end")


@pytest.mark.parametrize("ranking", ["maskgit", "margin", "entropy"])
def test_dream_draws_positions_in_proportion(ranking: str) -> None:
    """With noise, one position is drawn from softmax(score / noise): 4,000 windows, chi-square."""
    decoder = build("decoder", f"dream:ranking={ranking}:filtered=false:noise=0.5")
    score = torch.tensor([0.9, 0.5, 0.1, 0.7]).repeat(4000, 1)
    rng = torch.Generator().manual_seed(3)
    proposal = Proposal(
        torch.zeros(4000, 4, dtype=torch.int64),
        score,
        entropy=-score,
        margin=score,
        noise=torch.rand(4000, 4, generator=rng),
    )
    states = [WindowState(opened=4)] * 4000
    found = decoder.commit(proposal, torch.ones(4000, 4, dtype=torch.bool), states).mask
    assert (found.sum(dim=1) == 1).all()
    expected = (score[0] / 0.5).softmax(dim=0) * 4000
    chi = ((found.sum(dim=0) - expected) ** 2 / expected).sum()
    assert chi < 16.3  # the 99.9 % point at 3 degrees


def test_dream_origin_sets_each_position_by_chance() -> None:
    """At step 5 of 10 each position is set with 1 - s / t, about 1 / 5; the last sets all."""
    decoder = build("decoder", "dream:ranking=origin:steps=10")
    rng = torch.Generator().manual_seed(4)
    noise = torch.rand(500, 40, generator=rng)
    proposal = Proposal(torch.zeros(500, 40, dtype=torch.int64), noise, noise=noise)
    masked = torch.ones(500, 40, dtype=torch.bool)
    found = decoder.commit(proposal, masked, [WindowState(40, steps=5)] * 500).mask
    t, s = 1 - 0.999 * 0.5, 1 - 0.999 * 0.6
    share = 1 - s / t
    assert abs(found.float().mean().item() - share) < 4 * math.sqrt(share * (1 - share) / 20_000)
    assert decoder.commit(proposal, masked, [WindowState(40, steps=9)] * 500).mask.all()


def test_remdm_by_confidence_prefers_the_unsure() -> None:
    """Two set tokens, decided with confidence 1 and 0: taken back in proportion e^-1 to 1."""
    decoder = build("decoder", "remdm:steps=4:eta=0.2:by_confidence=true")
    n = 20_000
    rng = torch.Generator().manual_seed(5)
    proposal = Proposal(
        torch.zeros(n, 6, dtype=torch.int64),
        torch.full((n, 6), 0.5),
        noise=torch.rand(n, 6, generator=rng),
        editable=torch.tensor([True, True, False, False, False, False]).repeat(n, 1),
    )
    masked = ~proposal.editable  # type: ignore[operator]
    was = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    states = [WindowState(6, 2, {"confidence": was}) for _ in range(n)]
    back = decoder.commit(proposal, masked, states).back.float().mean(dim=0)  # type: ignore[union-attr]
    weight = torch.tensor([math.exp(-1), 1.0]) / (math.exp(-1) + 1)
    torch.testing.assert_close(back[:2], 0.2 * 2 * weight, atol=0.015, rtol=0)
