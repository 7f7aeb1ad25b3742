"""What `LLM` and `AsyncLLM` share: a loaded model, an engine with memory for it, prompts."""

import math
from typing import Any

import torch

from dinfer.engine.engine import Engine, Limits
from dinfer.engine.input_processor import InputProcessor
from dinfer.errors import RequestError
from dinfer.kv.pool import page_bytes
from dinfer.loader.load import Loaded, load
from dinfer.resources import available_memory
from dinfer.step import PAGE

KV_MEMORY_FRACTION = 0.25
"""Share of a CPU's available memory that the KV cache takes at most, unless told otherwise."""

LATENCY_MAX_ROWS = {"cpu": 128, "cuda": 1024}
"""Rows in a step, by device, where nobody shall wait long for a step to end: enough that a row
costs little more than in a larger one.
"""


class BaseLLM:
    """A model ready for requests.

    model: bundled name, folder, GGUF file, hub id, or what `load` gave. dtype: auto, bfloat16,
    float16, float32. device: auto, cpu, cuda. facts: overrides of what the files say (mask_id,
    eos_ids, block_length, context, iteration, cache, decoder). kv_memory: GiB for the KV cache.
    max_rows: most rows in a step; None = no more than keep a step short (LATENCY_MAX_ROWS).
    compiled: None uses the native CPU kernels where they support the model (`NativeRunner`; seconds
    to compile, once a machine); True also compiles the models that they do not support with
    torch.compile (`CompiledModel`; seconds to minutes at the first step); False uses neither.
    quant: int8, int4 or int4:group=N stores the layers' weights in fewer bits. family: that of a
    model whose architecture has a name of its own; see the folder `model`. lora: folder or hub id
    of a LoRA adapter, which is added to the weights.
    Raises DinferError with one clear sentence for anything wrong.
    """

    def __init__(
        self,
        model: str | Loaded,
        dtype: str = "auto",
        device: str = "auto",
        facts: dict[str, Any] | None = None,
        kv_memory: float | None = None,
        max_sequences: int = 64,
        max_rows: int | None = 8192,
        compiled: bool | None = None,
        quant: str | None = None,
        family: str | None = None,
        gpu_memory_utilization: float = 0.9,
        lora: str | None = None,
    ) -> None:
        self.loaded = (
            model
            if isinstance(model, Loaded)
            else load(model, dtype, device, facts, quant, family, compiled, lora)
        )
        self.facts, self.tokenizer = self.loaded.facts, self.loaded.tokenizer
        limits = fit_limits(
            self.loaded, max_sequences, max_rows, kv_memory, utilization=gpu_memory_utilization
        )
        self.engine = Engine(self.loaded.model, self.facts, self.tokenizer, limits, compiled)
        self.prompts = InputProcessor(self.loaded)


def fit_limits(
    loaded: Loaded,
    sequences: int,
    rows: int | None,
    kv_memory: float | None,
    poison: bool = False,
    utilization: float = 0.9,
) -> Limits:
    """Pages for `sequences` full contexts, or as many as `kv_memory` GiB hold (None: as `kv_budget`
    says).
    """
    weight = loaded.model.embedding.weight
    size = page_bytes(loaded.model.shape, weight.dtype)
    context = -(-loaded.facts.context // PAGE)
    if not 0 < utilization <= 1:
        raise RequestError(f"gpu_memory_utilization is {utilization}; it must be in (0, 1].")
    if kv_memory is None:
        budget = kv_budget(weight.device, utilization)
    elif 0 < kv_memory < math.inf:
        budget = kv_memory * 2**30
    else:
        raise RequestError(f"kv_memory is {kv_memory}; it must be a positive number of GiB.")
    pages = min(sequences * context, int(budget // size))
    if pages < 1:
        raise RequestError(
            f"The K/V pool of {budget / 2**30:.3f} GiB holds no page;"
            f" one needs {size / 2**20:.2f} MiB."
        )
    return Limits(sequences, rows or LATENCY_MAX_ROWS[weight.device.type], pages, poison)


def kv_budget(weight_device: torch.device, utilization: float) -> float:
    """Bytes for the KV cache, once the weights are loaded. On a GPU `utilization` of the card's
    memory, less what is in use; on a CPU, which others need as well, KV_MEMORY_FRACTION of what is
    available.
    """
    if weight_device.type == "cuda":
        free, total = torch.cuda.mem_get_info(weight_device)
        return utilization * total - (total - free)
    return KV_MEMORY_FRACTION * available_memory()
