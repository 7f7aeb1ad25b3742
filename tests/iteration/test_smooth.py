"""Iteration smoothing against plain passes of the model."""

from collections.abc import Callable

import pytest
import torch

from dinfer.attention.sdpa import Segment, attention, grouped
from dinfer.engine.engine import Engine
from dinfer.request import CanvasEvent, SamplingParams

from ..conftest import request, serve


def test_inputs_and_weights_step_by_step(make_engine: Callable[..., Engine]) -> None:
    """8 places, one window, one token a step: each step's input is worked out here, from the
    softmax of the step before.
    """
    engine = make_engine("llada")
    spec = "smooth:length=8:weight=0.3:start=0.1:growth=0.15"
    params = SamplingParams(
        max_tokens=8, iteration=spec, cache="none", decoder="fixed", ignore_eos=True
    )
    engine.add(request("a", [5, 9, 200], params))
    model, mask = engine.model, engine.facts.mask_id
    everything = grouped([Segment(0, 11, slice(0, 11))], torch.device("cpu"))
    tokens = torch.tensor([5, 9, 200] + [mask] * 8)
    soft = torch.zeros(11, model.shape.hidden)
    for weight in [0.1, 0.25, *[0.3] * 6]:
        masked = tokens == mask
        with torch.no_grad():
            x = model.embed(tokens) + weight * soft * masked[:, None]
            logits = model.head(
                model(x, torch.arange(11), lambda _, q, k, v: attention(q, k, v, everything))
            )
        logits[:, mask] = -torch.inf
        p = logits.softmax(dim=1)
        soft = p @ model.embedding.weight.detach()
        best = int(torch.where(masked, p.amax(dim=1), -1.0).argmax())
        tokens[best] = p[best].argmax()
        (event,) = [e for e in engine.step() if isinstance(e, CanvasEvent)]
        assert event.positions == [best - 3]
        assert event.token_ids == [int(tokens[best])]
        assert event.confidence == pytest.approx([p[best].max().item()], rel=1e-3)


def test_no_weight_is_blockwise(make_engine: Callable[..., Engine]) -> None:
    for family in ("llada", "sdar"):
        found = []
        for spec in ("blockwise:length=8", "smooth:length=8:weight=0", "smooth:length=8"):
            params = SamplingParams(max_tokens=20, iteration=spec, ignore_eos=True)
            found.append(serve(make_engine(family), [request("a", [3, 4], params)])["a"].token_ids)
        assert found[0] == found[1]
        assert found[0] != found[2] or family == "sdar"
