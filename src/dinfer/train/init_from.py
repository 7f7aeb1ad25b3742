"""Starting a LLaDA-form model from the weights of an SDAR-form one of the same sizes.

The two differ in the per-head norms of q and k. A norm divides by the row's root mean square,
which varies little between rows; with its mean folded into the projection, the model without norms
starts near the other one.
"""

from typing import Any

import torch
from torch import Tensor

from dinfer.nn.transformer import Transformer
from dinfer.train.loss import Noised, dense_attention


@torch.no_grad()
def carry_over(source: Transformer, target: Transformer, sample: Noised) -> None:
    """Copies the weights of `source` into `target`; `sample` is a batch to measure the norms on."""
    seen: dict[str, Tensor] = {}
    hooks = []
    for number, layer in enumerate(source.layers):
        for part in ("q_norm", "k_norm"):
            module = getattr(layer.attention, part)
            hooks.append(module.register_forward_pre_hook(_measure(seen, f"{number}.{part}")))
    examples = len(sample.tokens_BT)
    attend = dense_attention(examples, sample.visible_TT)
    source(source.embed(sample.tokens_BT.flatten()), sample.positions_T.repeat(examples), attend)
    for hook in hooks:
        hook.remove()
    own = target.state_dict()
    target.load_state_dict({name: x for name, x in source.state_dict().items() if name in own})
    pairs: Any = zip(source.layers, target.layers, strict=True)
    for number, (old, new) in enumerate(pairs):
        q, k = (
            seen[f"{number}.{p}"][:, None] * getattr(old.attention, p).weight
            for p in ("q_norm", "k_norm")
        )
        rows = torch.cat((q.flatten(), k.flatten()))
        new.attention.qkv.weight[: len(rows)] *= rows[:, None]


def _measure(seen: dict[str, Tensor], name: str):  # type: ignore[no-untyped-def]
    def hook(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        seen[name] = inputs[0].square().mean(dim=2).rsqrt().mean(dim=0)

    return hook
