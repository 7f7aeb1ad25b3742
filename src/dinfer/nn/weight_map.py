"""Where each tensor of a checkpoint goes: official name -> parameter of ours and its rows (fused
weights share one).
"""

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from dinfer.nn.quantized import QuantizedWeight
from dinfer.nn.transformer import ModelConfig

Weight = TypeVar("Weight", Tensor, QuantizedWeight)


@dataclass(frozen=True)
class WeightSlot:
    """A place in a parameter: the whole of it, or `rows` (start, stop) of its first axis.

    expert: the parameter has one more axis in front, and this is the place's number on it.
    """

    parameter: str
    rows: tuple[int, int] | None = None
    expert: int | None = None

    def of(self, parameter: Weight) -> Weight:
        """The view of the parameter that this place is."""
        part = parameter if self.expert is None else parameter[self.expert]
        return part if self.rows is None else part[self.rows[0] : self.rows[1]]


def layer_slots(shape: ModelConfig, number: int, official: dict[str, str]) -> dict[str, WeightSlot]:
    """Slots of one layer. `official` maps our nouns to the names in the file; nouns that the layer
    does not have are left out, and names of experts hold `{}` for the expert's number.
    """
    slots = _attention_slots(shape, f"layers.{number}.")
    mixture = shape.mixture_at(number)
    if mixture is None:
        slots |= _mlp_slots(f"layers.{number}.mlp.", shape.intermediate)
        return {official[noun]: slot for noun, slot in slots.items() if noun in official}
    ours = f"layers.{number}.mlp."
    slots |= {
        "router": WeightSlot(ours + "router.weight"),
        "router_bias": WeightSlot(ours + "router.bias"),
    }
    if mixture.shared:
        shared = _mlp_slots(ours + "shared.", mixture.shared)
        slots |= {f"shared_{noun}": slot for noun, slot in shared.items()}
    table = {official[noun]: slot for noun, slot in slots.items() if noun in official}
    for noun, slot in _mlp_slots(ours, mixture.intermediate).items():
        name = official[f"expert_{noun}"]
        for expert in range(mixture.experts):
            table[name.format(expert)] = WeightSlot(slot.parameter, slot.rows, expert)
    return table


def _attention_slots(shape: ModelConfig, ours: str) -> dict[str, WeightSlot]:
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    qkv = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    slots = {
        "qkv": WeightSlot(ours + "attention.qkv.weight"),
        "out": WeightSlot(ours + "attention.out.weight"),
        "q_norm": WeightSlot(ours + "attention.q_norm.weight"),
        "k_norm": WeightSlot(ours + "attention.k_norm.weight"),
        "attention_norm": WeightSlot(ours + "attention_norm.weight"),
        "mlp_norm": WeightSlot(ours + "mlp_norm.weight"),
    }
    for noun, rows in qkv.items():
        slots[noun] = WeightSlot(ours + "attention.qkv.weight", rows)
        slots[f"{noun}_bias"] = WeightSlot(ours + "attention.qkv.bias", rows)
    return slots


def _mlp_slots(ours: str, wide: int) -> dict[str, WeightSlot]:
    return {
        "gate": WeightSlot(ours + "gate_up.weight", (0, wide)),
        "up": WeightSlot(ours + "gate_up.weight", (wide, 2 * wide)),
        "down": WeightSlot(ours + "down.weight"),
    }


def official(model: nn.Module, slots: dict[str, WeightSlot]) -> dict[str, Tensor]:
    """The weights of a model under their names in the file, as views."""
    parameters = dict(model.named_parameters())
    return {name: slot.of(parameters[slot.parameter].detach()) for name, slot in slots.items()}
