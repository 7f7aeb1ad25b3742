"""The dense body in one call of our own kernels gives what the model gives, but for rounding."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dinfer.bench.step import batch_of
from dinfer.engine.engine import Engine, Limits
from dinfer.loader.load import Loaded, empty, family_of
from dinfer.loader.weights import places
from dinfer.nn import quantized
from dinfer.request import SamplingParams
from dinfer.runner.native_cpu import NativeRunner

from ..conftest import request, serve

pytestmark = pytest.mark.usefixtures("native")

QWEN: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "mask_token_id": 299, "eos_token_id": 298,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "architectures": ["LLaDAModelLM"], "d_model": 128, "n_heads": 2, "n_layers": 2,
        "mlp_hidden_size": 320, "embedding_size": 300, "rope_theta": 10000.0,
        "max_sequence_length": 2048, "mask_token_id": 299, "eos_token_id": 298,
        "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True,
        "alibi": False, "include_bias": False, "include_qkv_bias": False,
        "attention_layer_norm": False, "input_emb_norm": False, "scale_logits": False,
    },
    # Norms of heads, grouped heads wider than their share, blocks.
    "sdar": QWEN | {"architectures": ["SDARForCausalLM"], "head_dim": 64, "block_size": 4},
    # Biases, shifted logits; six queries share a key.
    "dream": QWEN | {"architectures": ["DreamModel"], "hidden_size": 192, "intermediate_size": 128,
                     "num_attention_heads": 6, "num_key_value_heads": 1},
    # The head is the embedding.
    "tied": QWEN | {"architectures": ["SDARForCausalLM"], "block_size": 4,
                    "tie_word_embeddings": True},
    # Causal text before the open blocks: some steps need a mask.
    "fast_dllm_v2": QWEN | {"architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 8},
    # Experts chosen by a softmax, whose weights sum to 1.
    "sdar_moe": QWEN | {
        "architectures": ["SDARMoeForCausalLM"], "block_size": 4, "head_dim": 32,
        "moe_intermediate_size": 64, "num_experts": 12, "num_experts_per_tok": 3,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    # Experts by a biased, grouped sigmoid, and one that all rows share; the first layer is dense.
    "llada2_moe": QWEN | {
        "architectures": ["LLaDA2MoeModelLM"], "head_dim": 64, "first_k_dense_replace": 1,
        "moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
        "topk_group": 2, "num_shared_experts": 1, "moe_router_enable_expert_bias": True,
        "routed_scaling_factor": 2.5, "rotary_dim": 32, "partial_rotary_factor": 0.5,
        "use_qk_norm": True, "score_function": "sigmoid", "norm_topk_prob": True,
        "use_qkv_bias": False, "use_bias": False, "use_rmsnorm": True,
    },
}  # fmt: skip


def loaded(
    name: str, dtype: torch.dtype = torch.bfloat16, quant: str | None = None, compiled: bool = True
) -> Loaded:
    """A model with random weights, the same for every dtype."""
    config = CONFIGS[name]
    family = family_of(config)
    shape = family.shape(config)
    model = empty(family, shape, dtype, torch.device("cpu"), quant, compiled)
    torch.manual_seed(1)
    for target in places(model, family.slots(shape)).values():
        size = tuple(target.shape)
        drawn = torch.randn(size) * size[-1] ** -0.5 if len(size) > 1 else 1 + torch.randn(size) / 9
        target.copy_(drawn.bfloat16().to(dtype))
    quantized.finalize(model)
    model.requires_grad_(False).eval()
    return Loaded(name, None, name, model, family.facts(config), None, None)  # type: ignore[arg-type]


def engine_of(given: Loaded, compiled: bool = True, **limits: int) -> Engine:
    room = {"sequences": 8, "rows": 4096, "pages": 64} | limits
    return Engine(given.model, given.facts, None, Limits(poison=True, **room), compiled)


@torch.inference_mode()
def hidden(given: Loaded, compiled: bool, rows: int, context: int) -> torch.Tensor:
    engine = engine_of(given, compiled)
    return engine.runner.forward(batch_of(engine, rows, context, 3)).float()


@cache
def reference(
    name: str, dtype: torch.dtype, quant: str | None, rows: int, context: int
) -> torch.Tensor:
    """What the model itself gives."""
    return hidden(loaded(name, dtype, quant, compiled=False), False, rows, context)


ROWS = [(8, 40), (32, 300), (70, 3)]
"""Rows and context: of three sequences each, one thread's own inputs and shared ones."""


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows,context", ROWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_as_near_to_float32_as_the_plain_model(name: str, rows: int, context: int) -> None:
    exact = reference(name, torch.float32, None, rows, context)
    plain = (reference(name, torch.bfloat16, None, rows, context) - exact).abs()
    given = loaded(name)
    assert isinstance(engine_of(given).runner.dense, NativeRunner)
    found = (hidden(given, True, rows, context) - exact).abs()
    if "moe" in name:  # rounding sends some rows to other experts, as it may
        assert found.mean(dim=1).median() <= plain.mean(dim=1).median()
    else:
        assert found.mean() <= plain.mean() and found.max() <= 1.5 * plain.max()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows,context", ROWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_float32(name: str, rows: int, context: int) -> None:
    exact = reference(name, torch.float32, None, rows, context)
    given = loaded(name, torch.float32)
    assert isinstance(engine_of(given).runner.dense, NativeRunner)
    assert torch.allclose(hidden(given, True, rows, context), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llada", "sdar", "llada2_moe"])
def test_int8(name: str, dtype: torch.dtype) -> None:
    exact = reference(name, torch.float32, None, 20, 50)
    plain = (reference(name, dtype, "int8", 20, 50) - exact).abs()
    found = (hidden(loaded(name, dtype, "int8"), True, 20, 50) - exact).abs()
    assert found.mean() <= 1.1 * plain.mean() and found.max() <= 1.5 * plain.max()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llada", "llada2_moe"])
def test_int4(name: str, dtype: torch.dtype) -> None:
    """The rows' int8 codes cost little beside the weights' 4 bits."""
    exact = reference(name, torch.float32, None, 20, 50)
    plain = (reference(name, dtype, "int4", 20, 50) - exact).abs()
    given = loaded(name, dtype, "int4")
    assert isinstance(engine_of(given).runner.dense, NativeRunner)
    assert (hidden(given, True, 20, 50) - exact).abs().mean() <= 1.1 * plain.mean()


def tokens(engine: Engine, requests: list[Any]) -> dict[str, list[int]]:
    return {name: output.token_ids for name, output in serve(engine, requests).items()}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "name,quant,dtype",
    [
        *((name, None, "bfloat16") for name in CONFIGS),
        *(("llada", None, "float32"), ("llada", "int8", "float32"), ("tied", "int8", "bfloat16")),
        *(("sdar", "int4", "bfloat16"), ("llada2_moe", "int4", "float32")),
    ],
)
def test_a_request_does_not_know_the_others(name: str, quant: str | None, dtype: str) -> None:
    """In bfloat16 too: a row goes through the same operations in any company."""
    given, rng = loaded(name, getattr(torch, dtype), quant), random.Random(3)
    requests = [
        request(
            str(n),
            [rng.randrange(290) for _ in range(rng.randint(1, 60))],
            SamplingParams(
                rng.randint(1, 40),
                ignore_eos=True,
                temperature=0.8 if n % 4 == 0 else 0.0,
                min_tokens=3 if n % 4 == 1 else 0,
                top_logprobs=2 if n % 5 == 2 else 0,
                seed=n,
                decoder=rng.choice(["fixed", "threshold:threshold=0.1", "factor:factor=2"]),
            ),
        )
        for n in range(12)
    ]
    alone: dict[str, list[int]] = {}
    for one in requests:
        alone |= tokens(engine_of(given), [one])
    assert tokens(engine_of(given), requests) == alone
    # Few pages: texts lie scattered, and so are their slots.
    assert tokens(engine_of(given, sequences=3, pages=10, rows=90), requests[::-1]) == alone


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name,decoder", [("llada", "wino:threshold=0.2:back=0.5"), ("fast_dllm_v2", None)]
)
def test_shadow_rows_and_masks(name: str, decoder: str | None, dtype: torch.dtype) -> None:
    """Every step gives what an engine without kernels gives for the same rows."""
    given = loaded(name, dtype)
    exact = loaded(name, torch.float32, compiled=False)
    native, plain = engine_of(given), engine_of(exact, False)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = native.runner.forward

    def both(batch: Any) -> torch.Tensor:
        for sequence in batch:  # the plain engine has the same pages
            sequence.canvas.stale[sequence.plan.index] = True
        found, other = forward(batch), plain.runner.forward(batch)
        pairs.append((found.float(), other))
        return found

    native.runner.forward = both  # type: ignore[method-assign]
    asked = [
        request(str(n), list(range(n, 20 + 30 * n)), SamplingParams(24, decoder=decoder,
                                                                    ignore_eos=True))
        for n in range(3)
    ]  # fmt: skip
    assert all(len(x) == 24 for x in tokens(native, asked).values())
    allowed = 1e-4 if dtype == torch.float32 else 0.1
    assert pairs and all(torch.allclose(x, y, rtol=allowed, atol=allowed) for x, y in pairs)


def test_scattered_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    given = loaded("sdar")
    asked = [request("a", list(range(70)), SamplingParams(40, ignore_eos=True))]
    whole = tokens(engine_of(given), asked)
    engine = engine_of(given)
    allocate = engine.pool.allocate
    monkeypatch.setattr(engine.pool, "allocate", lambda count: (allocate(count) or [])[::-1])
    assert tokens(engine, asked) == whole


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_a_slot_that_never_ran_is_noticed() -> None:
    engine = engine_of(loaded("llada"))
    batch = batch_of(engine, 8, 40, 3)
    slot = int(batch[1].places[0].slots[17])
    for arena in (engine.pool.keys(1), engine.pool.values(1)):
        arena[slot] = torch.nan
        rows = engine.runner.forward(batch).view(3, 8, -1).isnan().all(dim=2).all(dim=1)
        assert rows.tolist() == [False, True, False]
        arena[slot] = 0.0


@pytest.mark.usefixtures("kernels")
@torch.inference_mode()
def test_input_rows_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens' embeddings, or rows that are the same."""
    engine = engine_of(loaded("llada"))
    run, calls = engine.runner.dense, []
    assert run is not None
    monkeypatch.setattr(
        engine.runner, "dense", lambda *given: (calls.append(given), run(*given))[1]
    )
    hidden = engine.runner.forward(batch_of(engine, 8, 40, 3))
    inputs, spans, length, given, shades = calls[-1]
    assert given is None and not shades
    tokens = np.concatenate(inputs[: len(inputs) // 3])
    rows = engine.model.embed(torch.from_numpy(tokens))
    assert torch.equal(run(inputs, spans, length, rows), hidden)
    assert not torch.equal(run(inputs, spans, length, rows + 1), hidden)
