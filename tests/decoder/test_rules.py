"""Each decoder against the steps of its paper, written as a plain loop over one window at a time.

The decoder sees a batch of windows of different widths, and the loop one window; both go through
the same random distributions until nothing is masked.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dinfer.registry import build
from dinfer.step import NUM_TOP, Proposal, WindowState

from .rules import RULES, VOCAB, Seen


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
            top_tokens=ordered.indices[..., :NUM_TOP],
            top_probs=ordered.values[..., :NUM_TOP],
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
