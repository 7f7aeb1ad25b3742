"""DiffusionGemma against its official code: logits of text and canvas, each denoising step on its
own, and whole runs with the recorded draws in the place of random ones.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import dinfer.attention.metadata as sight_module
import dinfer.engine.engine as engine_module
import dinfer.kernel.sampling as propose_module
from dinfer import LLM, SamplingParams
from dinfer.attention.metadata import AttentionMetadata
from dinfer.canvas import Canvas
from dinfer.decoder.entropy import within
from dinfer.decoder.renoise import Renoise
from dinfer.engine.engine import Engine
from dinfer.engine.sequence import BlockTable, SequenceState, Strategy
from dinfer.errors import CheckpointError, DinferError, RequestError
from dinfer.loader.load import load
from dinfer.model import diffusion_gemma
from dinfer.registry import build
from dinfer.request import Request, TextEvent
from dinfer.step import Commit, Proposal, StepPlan

from ..conftest import GOLDEN, golden_cases, request, serve

FOLDER = GOLDEN / "diffusion_gemma"
LENGTH = 16
SOFT = "{}.self_conditioning_logits"
LOGITS = golden_cases("diffusion_gemma", "logits")
RUNS = golden_cases("diffusion_gemma", "generate")


def outputs() -> dict[str, Tensor]:
    return load_file(FOLDER / "outputs.safetensors")


def llm(**facts: Any) -> LLM:
    return LLM(str(FOLDER), "float32", "cpu", facts=facts, kv_memory=0.01)


def one_step(model: LLM, text: list[int], canvas: list[int], soft: Tensor | None) -> Tensor:
    """Hidden rows of a text and the canvas behind it. soft: logits of the step before."""
    engine = model.engine
    asked = request("a", text, SamplingParams(max_tokens=LENGTH))
    sequence = SequenceState(asked, engine._canvas(asked), engine.strategy(asked.params))
    sequence.place(engine.pool.allocate(sequence.pages_needed) or [])
    places = torch.arange(len(text), len(text) + LENGTH).numpy()
    sequence.canvas.draft(places, torch.tensor(canvas).numpy())
    if soft is not None:
        table = engine.model.embedding.weight
        sequence.expect(places, soft.softmax(dim=1).to(table.dtype) @ table)
    sequence.plan = StepPlan(range(len(sequence.canvas)), len(sequence.canvas))
    with torch.inference_mode():
        return engine.runner.forward([sequence])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("case", LOGITS, ids=lambda case: case["name"])
def test_logits(case: dict) -> None:
    model, stored = llm(), outputs()
    soft = stored.get(case.get("self_conditioning_tensor", ""))
    hidden = one_step(model, case["prompt_ids"], case["input_ids"], soft)
    logits = model.engine.model.head(hidden[-LENGTH:])
    close(logits, stored[case["logits_tensor"]])
    assert logits.argmax(dim=1).tolist() == case["argmax"]
    if "encoder_hidden_tensor" in case:
        text = stored[case["encoder_hidden_tensor"]]
        close(hidden[:-LENGTH][-len(text) :], text)


def test_each_step_alone() -> None:
    """Every step of a run, with the official logits of the step before as its condition."""
    case = next(case for case in RUNS if case["name"] == "generate_p13")
    model, stored = llm(), outputs()
    for number, step in enumerate(case["steps"]):
        scaled = f"{case['name']}.step{{}}.logits_over_temperature"
        soft = stored[scaled.format(number - 1)] if step["self_conditioning"] != "zeros" else None
        text = case["output_ids"][: step["positions"][0]]
        hidden = one_step(model, text, step["canvas_in"], soft)
        logits = model.engine.model.head(hidden[-LENGTH:])
        close(logits, stored[scaled.format(number)] * step["temperature"])
        assert logits.argmax(dim=1).tolist() == step["argmax_canvas"]


class Replay:
    """Gives the draws of an official run, and compares what the decoder sees and does."""

    def __init__(self, case: dict) -> None:
        self.case, self.steps, self.seen = case, case["steps"], 0
        self.stored = outputs()
        self.first: dict[int, int] = {}
        for step in self.steps:
            if step["self_conditioning"] == "zeros":
                self.first |= dict(zip(step["positions"], step["canvas_in"], strict=True))

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (engine_module, propose_module):
            monkeypatch.setattr(module, "random_tokens", self.random_tokens)
        monkeypatch.setattr(propose_module, "sample", self.sample)
        commit = Renoise.commit
        monkeypatch.setattr(Renoise, "commit", lambda *args: self.compare(args[1], commit(*args)))

    def random_tokens(self, seeds: Tensor, places: Tensor, steps: Tensor, vocab: int) -> Tensor:
        if steps[0] == 0:
            return torch.tensor([self.first.get(place, 0) for place in places.tolist()])
        return torch.tensor(self.steps[int(steps[0]) - 1]["canvas_out"])

    def sample(self, logits: Tensor, sampling: Any) -> Tensor:
        return torch.tensor(self.steps[int(sampling.step[0])]["sampled_canvas"])

    def compare(self, proposal: Proposal, commit: Commit) -> Commit:
        step = self.steps[self.seen]
        bound = self.case["settings"]["sampler_config"]["entropy_bound"]
        expected = self.stored[f"{self.case['name']}.step{self.seen}.entropy"]
        assert proposal.entropy is not None and commit.draft is not None
        torch.testing.assert_close(proposal.entropy[0], expected, atol=1e-2, rtol=0)
        everything = torch.ones(1, LENGTH, dtype=torch.bool)
        accepted = within(proposal.entropy, everything, bound)
        assert accepted[0].int().tolist() == step["accepted"]
        assert commit.draft[0].tolist() == step["canvas_out"]
        assert commit.tokens[0].tolist() == step["argmax_canvas"]
        assert bool(commit.mask.all()) == (step["finished"] or step["cur_step"] == 1)
        self.seen += 1
        return commit


@pytest.mark.parametrize("cache", ["block", "none"])
@pytest.mark.parametrize("case", RUNS, ids=lambda case: case["name"])
def test_runs_with_the_recorded_draws(
    case: dict, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token, with the official number of decoder passes; text needs none of its own."""
    s, prompt = case["settings"], case["prompt_ids"]
    replay = Replay(case)
    replay.put(monkeypatch)
    decoder = (
        f"renoise:bound={s['sampler_config']['entropy_bound']}:steps={s['max_denoising_steps']}"
        f":t_min={s['t_min']}:t_max={s['t_max']}:stable={s['stability_threshold']}"
        f":entropy={s['confidence_threshold']}"
    )
    params = SamplingParams(s["max_new_tokens"], temperature=1.0, cache=cache, decoder=decoder)
    (out,) = llm(eos_ids=[s["eos_token_id"]]).generate(prompt, params)
    answer = case["output_ids"][len(prompt) :]
    if s["eos_token_id"] in answer:
        assert out.finish_reason == "stop"
        answer = answer[: answer.index(s["eos_token_id"])]
    assert out.token_ids == answer
    assert out.stats.forward_passes == case["num_forward_passes"] == replay.seen


def test_a_canvas_is_denoised_whole(make_engine: Callable[..., Engine]) -> None:
    """How much of it is asked for changes nothing: the answer is cut."""
    for temperature in (0.0, 1.0):
        found = [
            serve(
                make_engine("diffusion_gemma"),
                [request("a", [5] * 9, SamplingParams(n, temperature, seed=4, ignore_eos=True))],
            )["a"]
            for n in (LENGTH, 10)
        ]
        assert len(found[0].token_ids) == LENGTH
        assert found[1].token_ids == found[0].token_ids[:10]
        assert found[1].stats.forward_passes == found[0].stats.forward_passes


def test_seeds_and_temperatures(make_engine: Callable[..., Engine]) -> None:
    """The seed draws the noise, at temperature 0 as well; the same seed gives the same tokens."""

    def tokens(**options: Any) -> list[int]:
        params = SamplingParams(LENGTH, ignore_eos=True, decoder="renoise:steps=2", **options)
        engine = make_engine("diffusion_gemma")
        return serve(engine, [request("a", [7, 8], params)])["a"].token_ids

    for temperature in (0.0, 1.0):
        one, two = (tokens(seed=seed, temperature=temperature) for seed in (1, 2))
        assert one != two and one == tokens(seed=1, temperature=temperature)


def test_text_in_a_canvas_stays(make_engine: Callable[..., Engine]) -> None:
    """Fixed tokens between the blanks are shown in every step, and given out in their place."""
    engine, fixed = make_engine("diffusion_gemma"), {3: 50, 9: 51, 20: 52}
    params = SamplingParams(decoder="renoise:steps=3")
    canvas = [1, 2, *(fixed.get(place) for place in range(24))]
    engine.add(replace(request("a", [], params), canvas=tuple(canvas), answer=2, stops=False))
    sequence = engine.scheduler.waiting[0]
    first = sequence.canvas.tokens.copy()
    outputs = [e.output for e in engine.step() if isinstance(e, TextEvent)]
    changed = np.flatnonzero(first != sequence.canvas.tokens)
    assert len(changed) and not {2 + place for place in fixed} & set(changed.tolist())
    while engine.busy:
        outputs += [e.output for e in engine.step() if isinstance(e, TextEvent)]
    assert outputs[-1] is not None and len(outputs[-1].token_ids) == 24
    assert all(outputs[-1].token_ids[place] == token for place, token in fixed.items())


def test_text_runs_once(make_engine: Callable[..., Engine]) -> None:
    """A prompt of three pages and four tokens: the second request runs 96 rows fewer. A finished
    canvas runs once more, as text, with the first step of the next.
    """
    engine, prompt = make_engine("diffusion_gemma"), [i * 7 % 300 for i in range(100)]
    params = SamplingParams(2 * LENGTH, ignore_eos=True, decoder="renoise:steps=3")
    cold, warm = (serve(engine, [request("a", prompt, params)])["a"] for _ in range(2))
    assert warm.token_ids == cold.token_ids
    assert cold.stats.rows_run == 100 + 3 * LENGTH + LENGTH + 3 * LENGTH
    assert (warm.stats.reused, warm.stats.rows_run) == (96, cold.stats.rows_run - 96)


@given(st.integers(0, 40), st.integers(1, 40), st.sampled_from([None, 1, 5, 64]), st.randoms())
@settings(deadline=None, max_examples=60)
def test_who_sees_whom(text: int, blanks: int, window: int | None, rng: random.Random) -> None:
    """Text sees the last `window` positions up to its own; open rows see the whole canvas and the
    last `window - 1` positions of the text. Masks of a few rows each are one big mask.
    """
    base = Request("a", (*[1] * text, *[None] * blanks), text, SamplingParams())
    length = text + -(-blanks // 8) * 8
    canvas = Canvas([*base.canvas, *[None] * (length - text - blanks)], text, length, None, 8, text)
    done = 8 * rng.randrange(-(-blanks // 8))
    canvas.write(np.arange(text, text + done), np.arange(done))
    start, stop = text + done, text + done + 8
    chosen = [p for p in range(start) if rng.random() < 0.6]
    rows = np.array([*chosen, *range(start, stop)])
    specs = {"iteration": "blockwise", "cache": "none", "decoder": "renoise"}
    sequence = SequenceState(
        base, canvas, Strategy(**{x: build(x, spec) for x, spec in specs.items()})
    )
    sequence.plan = StepPlan(rows, stop)
    place = BlockTable(
        rng.sample(range(200), length) + np.zeros(length, np.int64), in_one_run=False
    )
    seen = {row: np.zeros(200, bool) for row in range(len(rows))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sight_module, "CHUNK", 4)
        for span in AttentionMetadata(8, causal=True).spans(sequence, place, rows, 0, window):
            mask = True if span.seen is None else span.seen
            for row, some in zip(
                range(span.start, span.stop), np.broadcast_to(mask, span.size), strict=True
            ):
                seen[row][np.asarray(span.slots)[some]] = True
    for row, position in enumerate(rows.tolist()):
        sees, high = (position + 1, position + 1) if position < start else (start + 1, stop)
        low = 0 if window is None else max(0, sees - window)
        assert sorted(place.slots[low:high]) == np.flatnonzero(seen[row]).tolist()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"decoder": "threshold"}, "'threshold' fills in masks.*'renoise:steps=8"),
        ({"iteration": "smooth"}, "'smooth' softens masks.*'blockwise:length=16'"),
        ({"guidance": 1.5}, "guidance is 1.5.*leave it at 0"),
    ],
)
def test_what_needs_a_mask_token_is_refused(
    make_engine: Callable[..., Engine], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        make_engine("diffusion_gemma").strategy(SamplingParams(**options))


def test_masks_are_not_denoised(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(RequestError, match=r"'renoise' denoises random tokens.*'threshold"):
        make_engine("llada").strategy(SamplingParams(decoder="renoise"))


def test_facts() -> None:
    """The sampler's settings come from generation_config.json; a block of another length is
    counted from the answer too.
    """
    facts = load(str(FOLDER), "float32", "cpu", {"block_length": 8}).facts
    assert facts.decoder == ("renoise:steps=8:t_min=0.4:t_max=0.8:stable=1:entropy=0.005:bound=0.1")
    assert (facts.mask_id, facts.causal, facts.iteration) == (None, True, "blockwise:length=8")


@pytest.mark.parametrize("family", ["llada", "diffusion_gemma"])
def test_causal_text_needs_blocks(family: str) -> None:
    with pytest.raises(RequestError, match="'block_length' is None"):
        load(str(GOLDEN / family), "float32", "cpu", {"causal": True, "block_length": None})


def config(**text: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
    return read | {"text_config": read["text_config"] | text}


def test_both_spellings_of_the_full_layers_sizes() -> None:
    other = json.loads((FOLDER / "config_global_keys.json").read_text())
    found = diffusion_gemma.shape(config())
    assert diffusion_gemma.shape(other) == found
    assert [found.kv_at(layer) for layer in range(3)] == [(2, 16), (2, 16), (1, 32)]
    assert [found.window_at(layer) for layer in range(3)] == [8, 8, None]
    listed = diffusion_gemma.shape(config(layer_types=None, per_layer_config=None))
    assert (listed.full, listed.full_head_size, listed.full_kv_heads) == ((2,), 512, 2)


@pytest.mark.parametrize(
    "text",
    [
        {"use_bidirectional_attention": "all"},
        {"hidden_activation": "silu"},
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        {"per_layer_config": {"1": {"head_dim": 32}}},
        {"per_layer_config": {"2": {"sliding_window": 4}}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        {"num_experts": None},
    ],
)
def test_unsupported_settings_are_named(text: dict[str, Any]) -> None:
    (key,) = text
    named = "rope_type" if key == "rope_parameters" else key
    with pytest.raises(CheckpointError, match=named):
        diffusion_gemma.shape(config(**text))


def test_no_mask_id_where_one_is_needed(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llada" / file, tmp_path / file)
    given = json.loads((tmp_path / "config.json").read_text()) | {"mask_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(DinferError, match="no mask id"):
        load(str(tmp_path), "float32", "cpu")


def test_half_precision_is_near() -> None:
    """Looser than for the others: near ties of the router change experts."""
    case, stored = LOGITS[4], outputs()
    model = LLM(str(FOLDER), "bfloat16", "cpu", kv_memory=0.01)
    hidden = one_step(
        model, case["prompt_ids"], case["input_ids"], stored[SOFT.format(case["name"])]
    )
    found, expected = model.engine.model.head(hidden[-LENGTH:]), stored[case["logits_tensor"]]
    assert torch.linalg.norm(found - expected) < 0.1 * torch.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 5])
def test_against_transformers(layers: int, tmp_path: Path) -> None:
    """Random sizes and weights in the folder that the official code itself writes."""
    official = pytest.importorskip("transformers.models.diffusion_gemma")
    pytest.importorskip("transformers", minversion="5.17")
    text = official.DiffusionGemmaTextConfig(
        vocab_size=150, hidden_size=48, intermediate_size=40, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=3, head_dim=8, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"]
        if layers == 5 else None,
        num_experts=6, top_k_experts=3, moe_intermediate_size=24, max_position_embeddings=256,
        global_head_dim=24, num_global_key_value_heads=2, final_logit_softcapping=12.0,
    )  # fmt: skip
    vision = {
        "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1,
    }  # fmt: skip
    whole = official.DiffusionGemmaConfig(
        text_config=text.to_dict(), vision_config=vision, canvas_length=LENGTH
    )
    torch.manual_seed(layers)
    model = official.DiffusionGemmaForBlockDiffusion(whole).eval()
    scalars = [x for name, x in model.named_buffers() if name.endswith("layer_scalar")]
    for x in [*model.parameters(), *scalars]:
        x.data += 0.1 * torch.randn_like(x)
    model.save_pretrained(tmp_path)
    ours = LLM(str(tmp_path), "float32", "cpu", kv_memory=0.01)
    for length in (1, 4, 37):
        prompt, canvas = torch.randint(150, (1, length)), torch.randint(150, (1, LENGTH))
        soft = torch.randn(1, LENGTH, 150)
        with torch.no_grad():
            expected = model(
                input_ids=prompt, decoder_input_ids=canvas, self_conditioning_logits=soft
            ).logits
        hidden = one_step(ours, prompt[0].tolist(), canvas[0].tolist(), soft[0])
        close(ours.engine.model.head(hidden[-LENGTH:]), expected[0])
