"""Where each tensor of a checkpoint goes: official name -> parameter of ours and its rows (fused
weights share one).
"""

from dataclasses import dataclass

from torch import Tensor, nn

from dinfer.nn.transformer import Shape


@dataclass(frozen=True)
class Slot:
    """A place in a parameter: the whole of it, or `rows` (start, stop) of its first axis."""

    parameter: str
    rows: tuple[int, int] | None = None


def layer_slots(shape: Shape, number: int, official: dict[str, str]) -> dict[str, Slot]:
    """Slots of one layer. `official` maps our nouns (q, k, v, out, gate, up, down, ...) to the
    names in the file.
    """
    ours = f"layers.{number}."
    q, kv, wide = (
        shape.heads * shape.head_size,
        shape.kv_heads * shape.head_size,
        shape.intermediate,
    )
    slots = {
        "q": Slot(ours + "attention.qkv.weight", (0, q)),
        "k": Slot(ours + "attention.qkv.weight", (q, q + kv)),
        "v": Slot(ours + "attention.qkv.weight", (q + kv, q + 2 * kv)),
        "out": Slot(ours + "attention.out.weight"),
        "q_norm": Slot(ours + "attention.q_norm.weight"),
        "k_norm": Slot(ours + "attention.k_norm.weight"),
        "attention_norm": Slot(ours + "attention_norm.weight"),
        "mlp_norm": Slot(ours + "mlp_norm.weight"),
        "gate": Slot(ours + "mlp.gate_up.weight", (0, wide)),
        "up": Slot(ours + "mlp.gate_up.weight", (wide, 2 * wide)),
        "down": Slot(ours + "mlp.down.weight"),
    }
    return {name: slots[noun] for noun, name in official.items()}


def official(model: nn.Module, slots: dict[str, Slot]) -> dict[str, Tensor]:
    """The weights of a model under their names in the file, as views."""
    parameters = dict(model.named_parameters())
    return {
        name: parameters[slot.parameter].detach()[slice(*slot.rows) if slot.rows else ...]
        for name, slot in slots.items()
    }
