"""The baseline takes the tokens and forwards of the official Fast-dLLM runs."""

import pytest

from dinfer.bench.baseline import Settings, generate
from dinfer.loader.load import Loaded

from ..conftest import golden_cases

CASES = [
    pytest.param(family, case, id=f"{family}-{case['name']}")
    for family in ("llada", "llada_gqa")
    for case in golden_cases(family, "generate")
    if case["algorithm"].startswith("fastdllm")
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_baseline_repeats_the_official_runs(
    models: dict[str, Loaded], family: str, case: dict
) -> None:
    loaded, given = models[family], case["settings"]
    mode = next((m for m in ("prefix", "dual") if m in case["algorithm"]), "none")
    steps = given["steps"] // (given["gen_length"] // given["block_length"])
    settings = Settings(given["gen_length"], given["block_length"], mode, given["threshold"], steps)
    found, passes = generate(loaded.model, case["prompt_ids"], loaded.facts.mask_id, settings)
    assert found == case["output_ids"][len(case["prompt_ids"]) :]
    assert passes == case["num_forward_passes"]


def test_there_are_official_runs() -> None:
    assert len(CASES) == 36
