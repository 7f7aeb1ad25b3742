"""A family that the caller names: the right one under any architecture, every other one refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dinfer import LLM, SamplingParams
from dinfer.errors import CheckpointError, RequestError, UnknownName
from dinfer.loader.load import load
from dinfer.loader.quantize import quantize
from dinfer.registry import names

from ..conftest import FAMILIES, GOLDEN, golden_facts

MISFIT = r"config\.json (has|gives) (no )?'\w+'|(missing|unexpected): [\w.]+\w|[\w.]+ has the shape"


def own(folder: str) -> str:
    """The family of a golden folder, by its name."""
    return folder.removesuffix("_gqa")


OTHERS = [
    (folder, family) for folder in FAMILIES for family in names("model") if family != own(folder)
]


def renamed(folder: str, parent: Path, **values: Any) -> str:
    """A copy whose architecture nobody knows."""
    made = parent / folder
    shutil.copytree(GOLDEN / folder, made)
    config = json.loads((made / "config.json").read_text())
    config |= {"architectures": ["MyOwnModel"]} | values
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def tokens(model: str, folder: str, family: str | None = None) -> list[int]:
    facts = golden_facts(folder)
    llm = LLM(model, "float32", "cpu", facts=facts, kv_memory=0.01, family=family)
    (out,) = llm.generate(range(20, 33), SamplingParams(9, ignore_eos=True))
    return out.token_ids


@pytest.mark.parametrize(("folder", "family"), OTHERS)
def test_another_family_is_refused(folder: str, family: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(str(GOLDEN / folder), "float32", "cpu", golden_facts(folder), family=family)
    said = str(caught.value)
    assert repr(family) in said and repr(own(folder)) in said
    assert re.search(MISFIT, said) and said.endswith(".") and len(said) < 1000


@pytest.mark.parametrize("folder", FAMILIES)
def test_the_right_family_under_another_architecture(folder: str, tmp_path: Path) -> None:
    model = renamed(folder, tmp_path)
    with pytest.raises(CheckpointError, match=r"'MyOwnModel'.*which family.*Allowed"):
        load(model, "float32", "cpu")
    assert tokens(model, folder, own(folder)) == tokens(str(GOLDEN / folder), folder)


@pytest.mark.parametrize(
    ("folder", "family"), [("dream", "fast_dllm_v2"), ("sdar_moe", "llada_moe")]
)
def test_the_same_tensors_are_told_apart_whatever_the_architecture(
    folder: str, family: str, tmp_path: Path
) -> None:
    model = renamed(folder, tmp_path)
    for given, asked in ((model, family), (renamed(family, tmp_path), folder)):
        with pytest.raises(CheckpointError, match=rf"{asked!r}.*no known family: config\.json has"):
            load(given, "float32", "cpu", golden_facts(folder), family=asked)


def test_a_shape_that_does_not_fit(tmp_path: Path) -> None:
    model = renamed("sdar", tmp_path, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"'sdar'.*mlp\.down_proj\.weight has the shape"):
        load(model, "float32", "cpu", family="sdar")


def test_an_unknown_family() -> None:
    with pytest.raises(
        UnknownName, match=r"family 'sdra'.*Did you mean 'sdar'\?.*Allowed: .*llada"
    ):
        load(str(GOLDEN / "sdar"), "float32", "cpu", family="sdra")


def test_what_was_quantized_needs_the_option_no_more(tmp_path: Path) -> None:
    model, target = renamed("dream", tmp_path), tmp_path / "int8"
    list(quantize(model, target, "int8", "dream"))
    plain = LLM(str(GOLDEN / "dream"), "float32", "cpu", quant="int8", kv_memory=0.01)
    (out,) = plain.generate(range(20, 33), SamplingParams(9, ignore_eos=True))
    assert tokens(str(target), "dream") == out.token_ids


def test_a_named_shape_has_a_family() -> None:
    from dinfer.bench.shape import open_any

    with pytest.raises(RequestError, match="Family of the shape 'tiny'"):
        open_any("tiny", "float32", "cpu", family="sdar")
