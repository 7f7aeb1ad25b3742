"""Starting a model from the weights of another one.

`grow`: from one of the same form with fewer layers or other tokens.

`carry_over`: a LLaDA-form model from an SDAR-form one of the same sizes. The two differ in the
per-head norms of q and k. A norm divides by the row's root mean square, which varies little between
rows; with its mean folded into the projection, the model without norms starts near the other one.
"""

from typing import Any

import tokenizers
import torch
from torch import Tensor

from dinfer.nn.transformer import Transformer
from dinfer.train.loss import Noised, dense_attention


@torch.no_grad()
def grow(
    source: Transformer,
    source_tokenizer: tokenizers.Tokenizer,
    target: Transformer,
    tokenizer: tokenizers.Tokenizer,
) -> None:
    """Copies the weights of `source` into `target`, which is as wide. Layers beyond those of the
    source begin as the identity (their outputs are zero); a token that the source does not have
    begins as the mean of the tokens that spell it there.
    """
    own = target.state_dict()
    kept = {name: x for name, x in source.state_dict().items() if name in own}
    target.load_state_dict(
        {**own, **{name: x for name, x in kept.items() if x.shape == own[name].shape}}
    )
    layers: Any = target.layers
    for layer in layers[len(source.layers) :]:
        layer.attention.out.weight.zero_()
        layer.mlp.down.weight.zero_()
    device = target.embedding.weight.device
    for token, place in tokenizer.get_vocab().items():
        known = source_tokenizer.token_to_id(token)
        pieces = [known] if known is not None else _spelt(source_tokenizer, token)
        for table, old in (
            (target.embedding.weight, source.embedding.weight),
            (target.head.weight, source.head.weight),
        ):
            table[place] = old[pieces].mean(dim=0).to(device)


def _spelt(tokenizer: tokenizers.Tokenizer, token: str) -> list[int]:
    """Ids that spell a byte-level token: each of its characters stands for one byte."""
    text = tokenizer.decoder.decode([token])
    if "\ufffd" not in text:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    known = tokenizer.get_vocab()
    return [known[byte] for byte in token]


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
