"""One denoising step against its floor.

The floor is the larger of two times: reading every weight and stored key and value once, and doing
every multiplication once, at the rates that this machine reaches on nothing else.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dinfer.bench.machine import Timing, product_rate, read_rate, seconds_of
from dinfer.canvas import Canvas
from dinfer.engine.engine import Engine, Limits
from dinfer.engine.sequence import SequenceState
from dinfer.errors import RequestError
from dinfer.loader.load import Loaded
from dinfer.nn.linear import GroupedLinear
from dinfer.nn.quantized import QuantizedGroupedLinear, QuantizedHead, QuantizedLinear
from dinfer.nn.transformer import Transformer
from dinfer.request import Request, SamplingParams
from dinfer.runner.sampler import sample_and_commit
from dinfer.step import PAGE, StepPlan, Window, WindowState

WARM_UP = 3
"""Steps that are run and not measured."""


@dataclass(frozen=True)
class Work:
    """What a step has to do: bytes to read and operations, for the whole batch."""

    bytes: int
    operations: int


def work_of(model: Transformer, rows: int, context: int, sequences: int) -> Work:
    """Bytes and operations of a step of `sequences`, each with `rows` masked rows that see
    `context` stored positions and one another. Of experts, those count that the rows touch when
    each row chooses evenly among all.
    """
    shape = model.shape
    weights: float = _held(model.norm)[0] + _held(model.head)[0]
    active: float = shape.vocab * shape.hidden
    for layer in model.layers.modules():
        read, elements = _held(layer)
        if isinstance(layer, GroupedLinear | QuantizedGroupedLinear):
            assert shape.mixture is not None
            part = shape.mixture.routing.top / layer.count
            read *= 1 - (1 - part) ** (rows * sequences)
            elements *= part
        weights, active = weights + read, active + elements
    size, seen = model.embedding.weight.itemsize, context + rows
    stored = shape.stored * seen * size
    pairs = 4 * shape.layers * shape.heads * shape.head_size * rows * seen
    return Work(
        round(weights) + sequences * stored,
        round(sequences * (2 * rows * active + pairs)),
    )


def _held(layer: nn.Module) -> tuple[float, float]:
    """Bytes and number of the weights that lie in a module itself, not in its parts."""
    own = list(layer.parameters(recurse=False))
    read, elements = sum(p.nbytes for p in own), sum(p.numel() for p in own)
    if isinstance(layer, QuantizedLinear | QuantizedGroupedLinear | QuantizedHead):
        return read + layer.bytes, elements + math.prod(layer.shape)
    return read, elements


@dataclass(frozen=True)
class Step:
    """A measured step, in milliseconds. floor: the larger of `floor_bytes` and
    `floor_operations`; ratio: median over floor. rates: GB/s and GFLOP/s.
    """

    rows: int
    context: int
    sequences: int
    milliseconds: Timing
    floor_bytes: float
    floor_operations: float
    read_rate: float
    product_rate: float

    @property
    def floor(self) -> float:
        """Milliseconds that no step can go below."""
        return max(self.floor_bytes, self.floor_operations)

    @property
    def ratio(self) -> float:
        """Measured median over the floor."""
        return self.milliseconds.median / self.floor

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "floor": self.floor, "ratio": self.ratio}


def batch_of(engine: Engine, rows: int, context: int, sequences: int) -> list[SequenceState]:
    """Sequences whose context is stored and whose last `rows` positions are masked and planned."""
    length, batch = context + rows, []
    for number in range(sequences):
        tokens: list[int | None] = [(7 * p + number) % (engine.model.shape.vocab - 1)
                                    for p in range(context)]  # fmt: skip
        request = Request(str(number), (*tokens, *[None] * rows), context, SamplingParams())
        canvas = Canvas(
            list(request.canvas), context, length, engine.facts.mask_id, engine.facts.block_length
        )
        sequence = SequenceState(request, canvas, engine.strategy(request.params))
        pages = engine.pool.allocate(sequence.pages_needed)
        assert pages is not None
        sequence.place(pages)
        sequence.plan = StepPlan(range(length), length)
        engine.runner.forward([sequence])
        sequence.window, sequence.states = Window(context, length), [WindowState(rows)]
        sequence.plan = StepPlan(range(context, length), length)
        batch.append(sequence)
    return batch


@torch.inference_mode()
def measure_step(
    loaded: Loaded,
    rows: int,
    context: int,
    sequences: int,
    repeats: int,
    compiled: bool | None = None,
) -> Step:
    """Times forward, head, proposal and the decoder's choice, as the engine runs them."""
    if rows + context > loaded.facts.context:
        raise RequestError(
            f"{context} stored positions and {rows} rows were asked for;"
            f" the context of this model is {loaded.facts.context}."
        )
    pages = sequences * -(-(rows + context) // PAGE)
    limits = Limits(sequences, pages=pages)
    engine = Engine(loaded.model, loaded.facts, loaded.tokenizer, limits, compiled)
    batch = batch_of(engine, rows, context, sequences)
    weight = loaded.model.embedding.weight

    def step() -> None:
        sample_and_commit(batch, engine.runner.forward(batch), loaded.model, loaded.facts.mask_id)

    for _ in range(WARM_UP):
        step()
    times = [1000 * seconds_of(step, weight.device) for _ in range(repeats)]
    work = work_of(loaded.model, rows, context, sequences)
    read = read_rate(work.bytes, weight.dtype, weight.device)
    product = product_rate(weight.dtype, weight.device)
    return Step(
        rows,
        context,
        sequences,
        Timing.of(times),
        1000 * work.bytes / read,
        1000 * work.operations / product,
        read / 1e9,
        product / 1e9,
    )
