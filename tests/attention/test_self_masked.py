"""Shadow rows against attention over slots in which their own keys and values were written."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dinfer.attention.sdpa import Segment, attention, attention_reference, grouped
from dinfer.attention.self_masked import SelfMaskedRows, self_masked_attention
from dinfer.decoder.wino import Wino
from dinfer.engine.engine import Engine
from dinfer.request import SamplingParams
from dinfer.step import Commit, Proposal

from ..conftest import request, serve


@pytest.mark.parametrize("group", [1, 3])
def test_a_row_sees_itself_in_the_place_of_its_token(group: int) -> None:
    torch.manual_seed(group)
    kv_heads, size, slots = 2, 8, 30
    keys, values = torch.randn(slots, kv_heads, size), torch.randn(slots, kv_heads, size)
    q = torch.randn(5, kv_heads * group, size)
    k, v = torch.randn(5, kv_heads, size), torch.randn(5, kv_heads, size)
    scattered = np.random.default_rng(group).permutation(slots)[:17]
    shades = [
        SelfMaskedRows(Segment(0, 3, slice(4, 20)), torch.tensor([0, 7, 15])),
        SelfMaskedRows(Segment(3, 5, scattered), torch.tensor([3, 16])),
    ]
    places = [4, 11, 19, int(scattered[3]), int(scattered[16])]
    expected = []
    for row, place in enumerate(places):
        own_keys, own_values = keys.clone(), values.clone()
        own_keys[place], own_values[place] = k[row], v[row]
        sight = slice(4, 20) if row < 3 else scattered
        alone = slice(row, row + 1)
        expected.append(attention_reference(q[alone], own_keys, own_values, [Segment(0, 1, sight)]))
    found = self_masked_attention(q, k, v, keys, values, shades)
    torch.testing.assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_kept_is_the_probability_without_the_token(
    make_engine: Callable[..., Engine], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wino is told of set tokens, against a pass in which a mask stands beside the canvas."""
    engine, checked = make_engine(family), 0
    original = Wino.commit

    def commit(self: Wino, proposal: Proposal, masked: Tensor, states: list) -> Commit:
        nonlocal checked
        sequence = engine.scheduler.running[0]
        assert proposal.editable is not None and proposal.kept is not None
        for column in proposal.editable[0].nonzero()[:, 0].tolist():
            place = sequence.window.start + column
            expected = without(engine, sequence.canvas.tokens, place)
            assert proposal.kept[0, column].item() == pytest.approx(expected, rel=1e-3, abs=1e-7)
            checked += 1
        return original(self, proposal, masked, states)

    monkeypatch.setattr(Wino, "commit", commit)
    decoder = "wino:threshold=0.1:back=0.3:least=2:most=2"
    params = SamplingParams(max_tokens=12, cache="none", decoder=decoder, ignore_eos=True)
    serve(engine, [request("a", [5, 9, 20, 7, 7], params)])
    assert checked > 3


def without(engine: Engine, tokens: np.ndarray, place: int) -> float:
    """Probability of the token in a place, at a mask that stands there and is seen by nobody."""
    model, mask = engine.model, engine.facts.mask_id
    length, block = len(tokens), engine.facts.block_length or len(tokens)
    ids = torch.tensor([*tokens.tolist(), mask])
    positions = torch.tensor([*range(length), place])
    spans = [
        Segment(i, min(i + block, length), slice(0, i + block)) for i in range(0, length, block)
    ]
    reach = min(length, (place // block + 1) * block)
    others = np.array([i for i in range(reach) if i != place] + [length])
    own = grouped([Segment(0, 1, others)], ids.device)
    with torch.no_grad():
        hidden = model(
            model.embed(ids),
            positions,
            lambda _, q, k, v: torch.cat(
                (
                    attention(q[:-1], k[:-1], v[:-1], grouped(spans, ids.device)),
                    attention(q[-1:], k, v, own),
                )
            ),
        )
        logits = model.head(hidden[-1:])[0]
    logits[mask] = -torch.inf
    return logits.softmax(dim=0)[tokens[place]].item()
