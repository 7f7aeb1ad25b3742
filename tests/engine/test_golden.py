"""Parity with the official code: tiny checkpoints with the outputs that the original
implementations gave.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file

from dinfer import LLM, SamplingParams
from dinfer.canvas import Canvas
from dinfer.engine.sequence import SequenceState
from dinfer.request import CanvasEvent, Request
from dinfer.step import StepPlan

from ..conftest import FAMILIES, GOLDEN, golden_cases, golden_facts


def cases(kind: str) -> list:
    return [
        pytest.param(family, case, id=f"{family}-{case['name']}")
        for family in FAMILIES
        if family != "diffusion_gemma"  # its canvases are no masks: a file of its own
        for case in golden_cases(family, kind)
        if case["name"] != OVERWRITES
    ]


OVERWRITES = "low_confidence_dynamic_b4s2_p12_th50"
"""In this run the official loop has to fix two tokens with one mask left, takes a set position of
confidence -inf as the second, and writes over it; ours never changes a set token. So it is compared
pass by pass.
"""


def llm(family: str, **facts: object) -> LLM:
    facts = golden_facts(family) | facts
    return LLM(str(GOLDEN / family), dtype="float32", device="cpu", facts=facts, kv_memory=0.05)


@pytest.mark.parametrize(("family", "case"), cases("logits"))
def test_logits(family: str, case: dict) -> None:
    causal = case["attention"].startswith("block_causal")
    model = llm(family, **({"block_length": case["block_length"]} if causal else {}))
    if "cached_from_input_ids" in case:
        found = cached_logits(model, case)
    else:
        found = model.logits(case["input_ids"])
    expected = load_file(GOLDEN / family / "outputs.safetensors")[case["logits_tensor"]]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert found.argmax(dim=1).tolist() == case["argmax"]


def cached_logits(model: LLM, case: dict) -> torch.Tensor:
    """Runs the cached canvas, then the case's rows with its tokens over what is stored."""
    first, rows, later = case["cached_from_input_ids"], case["position_ids"], case["input_ids"]
    length = max(len(first), rows[-1] + 1)
    tokens = first + [0] * (length - len(first))
    engine = model.engine
    sequence = SequenceState(
        Request("a", tuple(tokens), 0, SamplingParams()),
        Canvas(tokens, 0, length, engine.facts.mask_id, engine.facts.block_length),
        engine.strategy(SamplingParams()),
    )
    sequence.place(engine.pool.allocate(sequence.pages_needed) or [])
    with torch.inference_mode():
        sequence.plan = StepPlan(range(len(first)), len(first))
        engine.runner.forward([sequence])
        sequence.canvas.tokens[rows[0] : rows[-1] + 1] = later
        sequence.plan = StepPlan(range(rows[0], rows[-1] + 1), length)
        found: torch.Tensor = engine.model.head(engine.runner.forward([sequence]))
    return found


@dataclass(frozen=True)
class Run:
    """An official loop in our words. passes: forwards that ours takes; `most` where ours may take
    fewer, since the official loop also runs passes that change nothing.
    """

    strategy: dict[str, str]
    answer: list[int]
    passes: int
    stop: int | None = None
    block: int | None = None
    most: bool = False


def fixed_or_threshold(s: dict, gen: int) -> str:
    if s.get("threshold"):
        return f"threshold:threshold={s['threshold']}"
    return f"fixed:steps={s['steps'] // (gen // s['block_length'])}"


def llada_loop(case: dict) -> Run:
    s, prompt = case["settings"], case["prompt_ids"]
    cache = next((c for c in ("prefix", "dual") if f"_{c}_" in case["algorithm"]), "none")
    strategy = {
        "decoder": fixed_or_threshold(s, s["gen_length"]),
        "cache": cache,
        "iteration": f"blockwise:length={s['block_length']}",
    }
    answer = case["output_ids"][len(prompt) :]
    return Run(strategy, answer, case["num_forward_passes"], most=cache != "none")


def dream_loop(case: dict) -> Run:
    run = llada_loop(case | {"settings": case["settings"] | {"gen_length": 32}})
    lead = run.strategy | {"decoder": run.strategy["decoder"] + ":lead=true"}
    return replace(run, strategy=lead)


def dream_schedule(case: dict) -> Run:
    s, prompt = case["settings"], case["prompt_ids"]
    ranking = {"maskgit_plus": "maskgit", "topk_margin": "margin", "entropy": "entropy"}[s["alg"]]
    strategy = {
        "decoder": f"dream:steps={s['steps']}:ranking={ranking}:eps={s['eps']}",
        "cache": "none",
        "iteration": "blockwise:length=0",
    }
    return Run(strategy, case["output_ids"][len(prompt) :], case["num_forward_passes"])


def dream_paced(case: dict) -> Run:
    s, prompt = case["settings"], case["prompt_ids"]
    strategy = {
        "decoder": f"threshold:threshold={s['threshold']}:pace={s['steps']}",
        "cache": "none",
        "iteration": "blockwise:length=0",
    }
    return Run(strategy, case["output_ids"][len(prompt) :], case["num_forward_passes"])


def dream_blocks(case: dict) -> Run:
    s = case["settings"]
    run = llada_loop(case | {"settings": s | {"gen_length": s["max_new_tokens"]}})
    steps = s["steps"] * s["block_length"] // s["max_new_tokens"]
    decoder = f"dream:steps={steps}:ranking={s['alg']}:eps={s['eps']}:lead=true"
    return replace(run, strategy=run.strategy | {"decoder": decoder})


def sdar_loop(case: dict) -> Run:
    """Ours has no prefill, and no pass per block that stores it."""
    s, prompt, ids = case["settings"], case["prompt_ids"], case["output_ids"]
    block, steps = s["block_length"], s["denoising_steps"]
    decoder = {
        "low_confidence_static": f"fixed:steps={steps}",
        "sequential": f"fixed:steps={steps}:ranking=sequential",
        "low_confidence_dynamic": f"threshold:threshold={s['confidence_threshold']}"
        f":strict=true:steps={steps}:filtered={str('top_k' in s).lower()}",
    }[s["remasking_strategy"]]
    blocks = len(ids) // block - len(prompt) // block
    passes = case["num_forward_passes"] - blocks - (len(prompt) >= block)
    (stop,) = s["stop_token_ids"] or [None]
    strategy = {"decoder": decoder, "cache": "block"}
    return Run(strategy, ids[len(prompt) :], passes, stop, block)


def llada2_loop(case: dict) -> Run:
    """Its passes are the denoising passes alone. A threshold above 1 is one that nothing passes."""
    s = case["settings"]
    block = s["block_length"]
    least, threshold = block // s["steps"], min(s["threshold"], 1.0)
    strategy = {
        "decoder": f"threshold:threshold={threshold}:strict=true:least={least}",
        "cache": "block",
    }
    stop = s["eos_id"] if s["eos_id"] in case["output_ids"] else None
    return Run(strategy, case["output_ids"], case["num_forward_passes"], stop, block)


def edit_loop(case: dict) -> Run:
    s = case["settings"]
    threshold, edit = s["threshold"], s["editing_threshold"]
    decoder = f"edit:threshold={threshold}:edit={edit}:rounds={s['max_post_steps']}"
    strategy = {"decoder": decoder, "cache": "block"}
    return Run(strategy, case["output_ids"], case["num_forward_passes"], None, s["block_length"])


def fast_dllm_v2_loop(case: dict) -> Run:
    """Its commit passes are ours that open a block with its first position; a prompt's tail runs
    along with the answer, where the official loop has a prefill before it.
    """
    s, prompt, ids = case["settings"], case["prompt_ids"], case["output_ids"]
    block = s["block_length"]
    strategy = {
        "decoder": f"threshold:threshold={s['threshold']}:strict=true",
        "cache": "subblock" if s["use_block_cache"] else "block",
        "iteration": f"subblock:block={block}:length={s['small_block_length']}",
    }
    prefill = len(prompt) > block and len(prompt) % block != 0
    stop = s["stop_token"] if s["stop_token"] in ids[len(prompt) :] else None
    passes = case["num_forward_passes"] - prefill
    return Run(strategy, ids[len(prompt) :], passes, stop, block)


LOOPS = {
    "llada_low_confidence_fixed_steps": llada_loop,
    "fastdllm_no_cache_fixed_steps": llada_loop,
    "fastdllm_no_cache_threshold": llada_loop,
    "fastdllm_prefix_cache_fixed_steps": llada_loop,
    "fastdllm_prefix_cache_threshold": llada_loop,
    "fastdllm_dual_cache_fixed_steps": llada_loop,
    "fastdllm_dual_cache_threshold": llada_loop,
    "dream_fastdllm_prefix_cache_threshold": dream_loop,
    "dream_fastdllm_dual_cache_threshold": dream_loop,
    "dream_fastdllm_no_cache_threshold": dream_paced,
    "dream_fastdllm_prefix_cache_fixed_steps": dream_blocks,
    "dream_fastdllm_dual_cache_fixed_steps": dream_blocks,
    "dream_fixed_steps": dream_schedule,
    "sdar_block_diffusion": sdar_loop,
    "llada2_block_diffusion": llada2_loop,
    "llada21_block_diffusion_edit": edit_loop,
    "fast_dllm_v2_batch_sample": fast_dllm_v2_loop,
}
"""The strategy of ours that follows each loop."""


@pytest.mark.parametrize("family", ["sdar", "sdar_moe"])
def test_official_passes_one_by_one(family: str) -> None:
    """From what each official pass saw, ours sets the same tokens in the masks. The second of the
    two passes over a block takes what is left.
    """
    (case,) = [c for c in golden_cases(family, "generate") if c["name"] == OVERWRITES]
    engine = llm(family, block_length=4).engine
    mask, text, passes = engine.facts.mask_id, list(case["prompt_ids"]), 0
    for seen, after in itertools.pairwise(case["forward_inputs"][1:]):
        if mask not in seen:  # the pass that stores the block
            text += seen
            continue
        steps = 2 if seen == [mask] * 4 else 1
        decoder = f"threshold:threshold=0.5:strict=true:steps={steps}"
        canvas = (*text, *(None if token == mask else token for token in seen))
        params = SamplingParams(4, ignore_eos=True, decoder=decoder, cache="block")
        engine.add(Request("a", canvas, len(text), params))
        (commit,) = [e for e in engine.step() if isinstance(e, CanvasEvent)]
        ours = dict(zip(commit.positions, commit.token_ids, strict=True))
        expected = {p: t for p, t in enumerate(after) if seen[p] == mask and t != mask}
        assert ours == expected
        engine.abort("a")
        passes += 1
    assert passes == 12


@pytest.mark.parametrize(("family", "case"), cases("generate"))
def test_reference_decodes(family: str, case: dict) -> None:
    s, prompt = case["settings"], case["prompt_ids"]
    run = LOOPS[case["algorithm"]](case)
    facts = {"block_length": run.block} if run.block else {}
    facts |= {"eos_ids": [run.stop]} if run.stop is not None else {}
    length = len(run.answer)
    if run.block:  # official loops decode their last block whole before they cut it
        length += -(len(prompt) + length) % run.block if family != "fast_dllm_v2" else 0
    params = SamplingParams(
        max_tokens=length,
        ignore_eos=run.stop is None,
        temperature=s.get("temperature") or 0.0,
        top_k=s.get("top_k") or 0,
        guidance=s.get("cfg_scale") or 0.0,
        **run.strategy,
    )
    (out,) = llm(family, **facts).generate(prompt, params)
    if run.stop is not None:
        assert out.finish_reason == "stop"
        assert out.token_ids == run.answer[: run.answer.index(run.stop)]
        assert out.stats.forward_passes <= case["num_forward_passes"]
        return
    assert out.token_ids[: len(run.answer)] == run.answer
    assert out.stats.forward_passes == run.passes or (
        run.most and out.stats.forward_passes < run.passes
    )
