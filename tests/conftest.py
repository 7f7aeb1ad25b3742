"""Shared pieces: tiny random models of each family, engines over them, and a model whose logits
are scripted.
"""

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor, nn

from dinfer.attention.backend import StoredKV
from dinfer.engine.engine import Engine, Limits
from dinfer.errors import RequestError
from dinfer.loader.load import Loaded, load
from dinfer.native import build
from dinfer.nn.transformer import ModelConfig
from dinfer.request import Output, Request, SamplingParams, TextEvent
from dinfer.step import ModelInfo

# Tiny tensors: a second thread costs more than it brings.
torch.set_num_threads(1)
# Without the phase that explains failures, which traces every line and slows the engine tenfold.
hypothesis.settings.register_profile(
    "plain", phases=[p for p in hypothesis.Phase if p is not hypothesis.Phase.explain]
)
hypothesis.settings.load_profile("plain")

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/cases.json"))
"""Every folder of tests/golden: a new one is put through all tests of families."""


def golden_facts(family: str) -> dict[str, int | None]:
    """What the config of a golden folder does not say: several families keep the mask id in the
    tokenizer alone.
    """
    return {"mask_id": json.loads((GOLDEN / family / "cases.json").read_text())["mask_token_id"]}


@pytest.fixture(scope="session")
def models() -> dict[str, Loaded]:
    """Each golden checkpoint, loaded once in float32."""
    return {
        name: load(str(GOLDEN / name), "float32", "cpu", golden_facts(name)) for name in FAMILIES
    }


@pytest.fixture
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of loaded models stay as they come, to be read or written over."""
    monkeypatch.setattr("dinfer.loader.load.packs", lambda device, dtype: False)
    monkeypatch.setattr("dinfer.loader.load.supports", lambda *_: False)


def _need_compiled() -> None:
    """Skips the test where the native kernels cannot be compiled for a path that the machine has.
    CI sets DINFER_TEST_NO_SKIP, which makes a failure of it.
    """
    if build.able():
        return
    reason = "the kernels cannot be compiled"
    if os.environ.get("DINFER_TEST_NO_SKIP"):
        pytest.fail(f"skipped, which DINFER_TEST_NO_SKIP forbids: {reason}")
    pytest.skip(reason)


def _paths() -> list[str]:
    """All paths of this kind of CPU, or the one that DINFER_KERNELS names."""
    if asked := os.environ.get(build.CHOICE):
        return [asked]
    arm = platform.machine() in ("aarch64", "arm64")
    return [path for path in build.PATHS if path.startswith("neon") == arm]


@pytest.fixture(params=_paths())
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The native kernels, on every path in turn."""
    path = str(request.param)
    if path == "off":
        pytest.skip(f"{build.CHOICE} is off")
    if path not in build.supported():
        pytest.skip(f"this machine cannot run the path {path}")
    monkeypatch.setenv(build.CHOICE, path)
    build.able.cache_clear()
    _need_compiled()
    return path


@pytest.fixture
def native() -> None:
    """The test needs the native kernels, on the path that is chosen."""
    if os.environ.get(build.CHOICE) == "off":
        pytest.skip(f"{build.CHOICE} is off")
    if build.chosen() is None:
        pytest.skip("there is no path of the kernels for this machine")
    _need_compiled()


@pytest.fixture
def make_engine(models: dict[str, Loaded]) -> Callable[..., Engine]:
    """An engine over a tiny model whose fresh pages are full of NaN."""

    def make(family: str, **limits: int) -> Engine:
        loaded = models[family]
        given = {"sequences": 64, "rows": 4096, "pages": 256, **limits}
        return Engine(loaded.model, loaded.facts, None, Limits(poison=True, **given))

    return make


def allows(engine: Engine, **options: Any) -> bool:
    """Whether the model may be served with these strategies."""
    try:
        engine.strategy(SamplingParams(**options))
    except RequestError:
        return False
    return True


def decoder_for(engine: Engine, decoder: str) -> str | None:
    """The decoder, or for a model that it does not suit the recommended one."""
    return decoder if allows(engine, decoder=decoder) else None


def request(
    name: str, prompt: list[int], params: SamplingParams, seed: int | None = None
) -> Request:
    """A plain completion request."""
    canvas = (*prompt, *[None] * params.max_tokens)
    return Request(name, canvas, len(prompt), params, seed=params.seed if seed is None else seed)


def serve(engine: Engine, requests: list[Request]) -> dict[str, Output]:
    """Runs requests to their end, all added at once."""
    for one in requests:
        engine.add(one)
    outputs = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, TextEvent) and event.output is not None:
                outputs[event.id] = event.output
    return outputs


class Scripted(nn.Module):
    """A model whose logits at each position are given: `script[position]` = (token, logit); all
    others 0.
    """

    conditioned = False

    def __init__(self, script: dict[int, tuple[int, float]], vocab: int = 16) -> None:
        super().__init__()
        self.shape = ModelConfig(vocab, 1, 1, 1, 1, 1, 1, 1e-6, 1e4, 128)
        self.embedding, self.layers = nn.Embedding(vocab, 1), nn.ModuleList()
        self.logits = torch.zeros(129, vocab)
        for position, (token, logit) in script.items():
            self.logits[position, token] = logit
        self.rows: list[list[int]] = []

    def embed(self, tokens_T: Tensor) -> Tensor:
        return tokens_T[:, None].float()

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: StoredKV) -> Tensor:
        # Rows behind those that are stored only make up a number.
        self.rows.append(positions_T[: len(attend.slots_T)].tolist())
        return positions_T[:, None].float()

    @property
    def head(self) -> "ScriptedHead":
        return ScriptedHead(self.logits)


class ScriptedHead:
    """Logits by position, as the script says."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.out_features = logits, logits.shape[1]

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        return self.logits[hidden_RD[:, 0].long()].clone()

    def columns(self, hidden_RD: Tensor, start: int, stop: int) -> Tensor:
        return self(hidden_RD)[:, start:stop]


MASK, EOS = 15, 14


@pytest.fixture
def scripted() -> Callable[..., Engine]:
    """An engine over a Scripted model; mask id 15, end-of-text 14."""

    def make(script: dict[int, tuple[int, float]], block: int | None = None) -> Engine:
        facts = ModelInfo(MASK, frozenset({EOS}), block, 128, "blockwise:length=8", "none", "fixed")
        return Engine(Scripted(script), facts, None, Limits(pages=16))

    return make


def golden_cases(family: str, kind: str) -> list[dict]:
    """The cases of a golden folder."""
    cases = json.loads((GOLDEN / family / "cases.json").read_text())["cases"]
    return [case for case in cases if case["kind"] == kind]
