"""DiffusionGemma against its official code: logits of text and canvas, each denoising step on its
own, and whole runs with the recorded draws in the place of random ones.
"""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dinfer.engine.engine as engine_module
import dinfer.kernel.propose as propose_module
from dinfer import LLM, SamplingParams
from dinfer.decoder.entropy import within
from dinfer.decoder.renoise import Renoise
from dinfer.engine.sequence import Sequence
from dinfer.step import Commit, Proposal, StepPlan

from ..conftest import GOLDEN, golden_cases, request

FOLDER = GOLDEN / "diffusion_gemma"
LENGTH = 16
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
    sequence = Sequence(asked, engine._canvas(asked), engine.strategy(asked.params))
    sequence.place(engine.pool.take(sequence.pages_needed) or [])
    places = torch.arange(len(text), len(text) + LENGTH).numpy()
    sequence.canvas.draft(places, torch.tensor(canvas).numpy())
    if soft is not None:
        sequence.expect(places, soft.softmax(dim=1) @ engine.model.embedding.weight)
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
