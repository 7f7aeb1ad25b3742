"""Scaled rotary embeddings against transformers' functions, and the spellings of settings."""

import json
from typing import Any

import pytest
import torch

from dinfer import LLM
from dinfer.errors import CheckpointError, RequestError
from dinfer.model import llada, llada2_moe, sdar

from ..conftest import GOLDEN

SHAPE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "vocab_size": 320, "num_hidden_layers": 1,
    "intermediate_size": 32,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
NUMBERS: list[tuple[dict[str, Any], list[float], float]] = [
    (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0,
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}},
        [0.4, 0.1379395, 0.04756828, 0.01640387, 0.005656854, 0.001950759, 0.0006727171,
         0.0002319857],
        1.0,
    ),
    (
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
        [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278],
        1.0,
    ),
    (
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
        [1.0, 0.2443846, 0.01304226, 0.003952847, 0.00125, 0.0003952847, 0.000125, 3.952847e-05],
        1.0,
    ),
    (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
         "low_freq_factor": 2.0, "high_freq_factor": 3.0}},
        [1.0, 0.1939228, 0.001175188, 0.0002278958, 4.419417e-05, 8.570256e-06, 1.661967e-06,
         3.222933e-07],
        1.0,
    ),
    (
        {"rope_theta": 1e4, "rope_scaling": YARN},
        [1.0, 0.2371708, 0.05, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0,
         "original_max_position_embeddings": 128, "beta_fast": 8.0, "beta_slow": 2.0,
         "truncate": False}},
        [1.0, 0.4216965, 0.08255588, 0.004686838, 0.001976424, 0.0008334509, 0.0003514633,
         0.0001482109],
        1.2772588722239782,
    ),
    (
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 40.0,
         "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}},
        [1.0, 0.2134537, 0.035, 0.0007905695, 0.00025, 7.905695e-05, 2.5e-05, 7.905694e-06],
        1.1557219901962608,
    ),
    (
        {"rope_theta": 1e4,
         "rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.25}},
        [1.0, 0.2766993, 0.075, 0.01976424, 0.005, 0.001581139, 0.0005, 0.0001581139],
        1.25,
    ),
]  # fmt: skip
"""Settings; what ROPE_INIT_FUNCTIONS of transformers 5.25 gives for a Qwen3Config."""


@pytest.mark.parametrize(("given", "rates", "factor"), NUMBERS)
def test_rates_are_those_of_transformers(
    given: dict[str, Any], rates: list[float], factor: float
) -> None:
    cos, sin = sdar.shape(SHAPE | given).rotary_rows(torch.tensor([1]))
    found = torch.atan2(sin, cos)[0, 0, :8]
    torch.testing.assert_close(found, torch.tensor(rates), rtol=2e-6, atol=0)
    torch.testing.assert_close(torch.hypot(sin, cos), torch.full_like(cos, factor))
    assert torch.equal(cos[..., :8], cos[..., 8:])


@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 1e4},
        {"rope_theta": 10000, "rope_scaling": None, "rope_parameters": None},
        {"rope_theta": 1e4, "rope_scaling": {}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "default"}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": None}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ],
)
def test_spellings_of_the_plain_one(given: dict[str, Any]) -> None:
    assert sdar.shape(SHAPE | given) == sdar.shape(SHAPE | {"rope_theta": 1e4})


def test_what_transformers_5_saves_for_the_golden_checkpoints() -> None:
    """`rope_parameters` in the place of `rope_theta`, LLaDA2's share of channels inside."""
    for family, module in (("llada", llada), ("sdar", sdar), ("llada2_moe", llada2_moe)):
        golden = json.loads((GOLDEN / family / "config.json").read_text())
        moved = {"rope_theta": golden["rope_theta"], "rope_type": "default"}
        if "partial_rotary_factor" in golden:
            moved["partial_rotary_factor"] = golden["partial_rotary_factor"]
        rest = {key: value for key, value in golden.items() if key not in (*moved, "rope_scaling")}
        assert module.shape(rest | {"rope_parameters": moved}) == module.shape(golden)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "'rope_theta'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, r"'rope_theta'.*must agree"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, "'longrope'.*llama3, yarn"),
        ({"rope_theta": 1e4, "rope_scaling": "linear"}, "'rope_scaling' as 'linear'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "'factor'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 0}}, "'factor' as 0"),
        ({"rope_theta": 1e4, "rope_scaling": {"factor": 2.0}}, "'factor': 2.0"),
        ({"rope_theta": 1e4, "rope_scaling": YARN | {"alpha": 3}}, "'alpha': 3"),
        ({"rope_theta": 1e4, "rope_scaling": YARN | {"beta_fast": 1}}, "between 1 and 1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'full_attention'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "'partial_rot"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        sdar.shape(SHAPE | given)


def test_partial_rotation_and_its_default() -> None:
    """LLaDA2 turns half of the channels where the config does not say it, as its class does."""
    golden = json.loads((GOLDEN / "llada2_moe" / "config.json").read_text())
    bare = {key: value for key, value in golden.items() if "rotary" not in key}
    assert llada2_moe.shape(bare).rotary == golden["head_dim"] // 2
    with pytest.raises(CheckpointError, match="'rotary_dim' as 16, but 'partial_rotary_factor'"):
        llada2_moe.shape(golden | {"partial_rotary_factor": 1.0})


def test_dynamic_scaling_ends_where_it_would_begin(tmp_path: Any) -> None:
    """Up to the trained positions it changes nothing; beyond them all rates would change with the
    length, stored keys included.
    """
    config = json.loads((GOLDEN / "llada" / "config.json").read_text())
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(GOLDEN / "llada" / "model.safetensors")
    ids = [7, 100, 311, 42]
    found, plain = (
        LLM(str(folder), "float32", "cpu", kv_memory=0.01)
        for folder in (tmp_path, GOLDEN / "llada")
    )
    assert torch.equal(found.logits(ids), plain.logits(ids))
    with pytest.raises(RequestError, match=r"'context' is 513.*'dynamic'.*512"):
        LLM(str(tmp_path), "float32", "cpu", facts={"context": 513})


def test_scaling_reaches_the_logits(tmp_path: Any) -> None:
    """Linear scaling by 2 is the plain rotation at half the positions: rows 0, 2, 4 of it."""
    config = json.loads((GOLDEN / "llada" / "config.json").read_text())
    shape = llada.shape(config)
    scaled = llada.shape(config | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    even, all_ = torch.arange(0, 8, 2), torch.arange(4)
    for one, other in zip(scaled.rotary_rows(even), shape.rotary_rows(all_), strict=True):
        torch.testing.assert_close(one, other)
