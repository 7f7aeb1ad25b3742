"""Masked-diffusion loss for both attention patterns.

Every example runs twice in a step under complementary masks (the trick of Fast-dLLM v2, arXiv
2509.26328), so each answer token is predicted exactly once. B examples, L canvas rows, R rows of
the two noisy copies, T all rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from dinfer.nn.attention import Attend
from dinfer.nn.transformer import Transformer
from dinfer.train.corpus import Ids

FAINT = 0.1
"""Weight of targets that carry little: the far masked future and the end-of-text fill."""

ORDERED = 0.5
"""Share of the blocks that are set up to a random cut and masked from there on, as confident
decoding tends to go from left to right: what cannot be known yet must not look sure.
"""


@dataclass(frozen=True)
class Noised:
    """One batch ready to run: rows, their positions, who sees whom, and the targets with their
    weights.
    """

    tokens_BT: Tensor
    positions_T: Tensor
    visible_TT: Tensor | None
    targets_BT: Tensor
    weights_BT: Tensor

    def to(self, device: torch.device) -> "Noised":
        """The batch on a device."""
        visible = self.visible_TT if self.visible_TT is None else self.visible_TT.to(device)
        return Noised(
            self.tokens_BT.to(device),
            self.positions_T.to(device),
            visible,
            self.targets_BT.to(device),
            self.weights_BT.to(device),
        )


def block_causal_batch(
    batch: list[Ids],
    block: int,
    mask_id: int,
    eos_id: int,
    rng: torch.Generator,
    all_masked: bool = False,
    one_prompt: bool = False,
) -> Noised:
    """Clean canvas once, then noisy copies of the answer's blocks that see the clean blocks before
    their own: two with complementary masks, or one that is `all_masked`.

    Tokens without weight are never masked. With `one_prompt` the blocks before the answer are one,
    as for a bidirectional model whose answer is cut off behind the window.

    The layout of block diffusion (arXiv 2503.09573, section 3): one pass trains every block. All
    masked with short blocks, every token is predicted from (nearly) all before it, so sums are
    learnt from every example and not only where chance leaves both numbers visible.
    """
    length = -(-max(len(x.prompt) + len(x.answer) for x in batch) // block) * block
    start = min(len(x.prompt) for x in batch) // block * block
    clean, answered, digits, worth = _canvas(batch, length, eos_id)
    own_end = torch.tensor([-(-(len(x.prompt) + len(x.answer)) // block) * block for x in batch])
    answered &= torch.arange(length) < own_end[:, None]
    hidden = _hidden(digits, block, rng)
    cut = torch.randint(0, block, (len(batch), length // block), generator=rng)
    ordered = torch.rand(len(batch), length // block, generator=rng) < ORDERED
    cut, ordered = (x.repeat_interleave(block, dim=1) for x in (cut, ordered))
    hidden = torch.where(ordered, torch.arange(length) % block >= cut, hidden)
    # One copy is enough where all is masked; else the second one has the complementary mask.
    parts = [torch.ones_like(hidden)] if all_masked else [hidden, ~hidden]
    copies = [torch.where(part & answered, mask_id, clean)[:, start:] for part in parts]
    places = torch.arange(length)
    positions = torch.cat((places, *[places[start:]] * len(parts)))
    lengths = torch.tensor([length, *[length - start] * len(parts)])
    copy = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    number = positions // block
    if one_prompt:
        number = number.clamp(min=start // block - 1)
    before = (copy[None, :] == 0) & (number[None, :] < number[:, None])
    same = (copy[None, :] == copy[:, None]) & (number[None, :] == number[:, None])
    weights = worth * answered
    kept = [torch.zeros_like(weights), *((weights * part)[:, start:] for part in parts)]
    targets = torch.cat((clean, *[clean[:, start:]] * len(parts)), dim=1)
    return Noised(
        torch.cat((clean, *copies), dim=1),
        positions,
        before | same,
        targets,
        torch.cat(kept, dim=1),
    )


def bidirectional_batch(
    batch: list[Ids], block: int, mask_id: int, eos_id: int, rng: torch.Generator
) -> Noised:
    """Two complementary masked copies of each canvas; half of the examples look like blockwise
    decoding.

    Those have everything before one block (counted from the prompt's end) set and everything after
    it masked. The canvas ends in a random length of end-of-text, as an answer in a larger canvas
    does.
    """
    longest = max(len(x.prompt) + len(x.answer) for x in batch)
    length = longest + int(torch.randint(0, 97, (), generator=rng))
    clean, answered, digits, worth = _canvas(batch, length, eos_id)
    hidden = _hidden(digits, length, rng)
    prompts = torch.tensor([len(x.prompt) for x in batch])[:, None]
    number = (torch.arange(length) - prompts).div(block, rounding_mode="floor")
    last = torch.tensor([(len(x.answer) + block // 2) // block for x in batch])[:, None]
    current = (torch.rand(len(batch), 1, generator=rng) * (last + 1)).long().clamp(max=number.max())
    blockwise = torch.rand(len(batch), 1, generator=rng) < 0.5
    cut = torch.randint(0, block, (len(batch), 1), generator=rng)
    ordered = torch.rand(len(batch), 1, generator=rng) < ORDERED
    offset = (torch.arange(length) - prompts) % block
    hidden = torch.where(blockwise & ordered, offset >= cut, hidden)
    future = blockwise & (number > current)
    open_rows = answered & (~blockwise | (number == current))
    weights = torch.where(future, FAINT, worth)
    tokens, kept = [], []
    for part in (hidden, ~hidden):
        masked = (part & open_rows) | (answered & future)
        tokens.append(torch.where(masked, mask_id, clean))
        kept.append(weights * masked)
    return Noised(
        torch.cat(tokens), torch.arange(length), None, torch.cat((clean, clean)), torch.cat(kept)
    )


def _hidden(digits_BL: Tensor, block: int, rng: torch.Generator) -> Tensor:
    """Masks at random rates [B, L], one rate for the words and one for the digits of each block:
    confident decoding sets the words first and meets the digits among words.
    """
    examples, length = digits_BL.shape
    words, figures = torch.rand(2, examples, length // block, generator=rng).repeat_interleave(
        block, dim=2
    )
    return torch.rand(examples, length, generator=rng) < torch.where(digits_BL, figures, words)


def _canvas(batch: list[Ids], length: int, eos_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids [B, L] filled up with end-of-text, which rows may be masked (in the answer or
    after it, and of some weight), which are digits, and their weights.
    """
    canvas = torch.full((len(batch), length), eos_id)
    weights = torch.full((len(batch), length), FAINT)
    digits = torch.zeros((len(batch), length), dtype=torch.bool)
    for row, weight, digit, ids in zip(canvas, weights, digits, batch, strict=True):
        start, end = len(ids.prompt), len(ids.prompt) + len(ids.answer)
        row[:end] = torch.tensor(ids.prompt + ids.answer)
        weight[start:end] = torch.tensor(ids.weights)
        digit[start:end] = torch.tensor(ids.digits)
    prompts = torch.tensor([len(x.prompt) for x in batch])[:, None]
    return canvas, (torch.arange(length) >= prompts) & (weights > 0), digits, weights


def dense_attention(examples: int, visible_TT: Tensor | None) -> Attend:
    """Attention inside each of `examples` canvases that lie one after another in the rows; stores
    nothing.
    """

    def attend(layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        q, k, v = (
            x.view(examples, -1, *x.shape[1:]).transpose(1, 2) for x in (q_THd, k_TKd, v_TKd)
        )
        if q.device.type == "cpu" and q.shape[1] == k.shape[1]:
            return _plain_attention(q, k, v, visible_TT).transpose(1, 2).flatten(0, 1)
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=visible_TT, enable_gqa=q.shape[1] != k.shape[1]
        )
        return mixed.transpose(1, 2).flatten(0, 1)

    return attend


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, visible_TT: Tensor | None) -> Tensor:
    """Attention as two products: with a mask and short canvases, forward and backward take less
    time on a CPU than those of the fused operation.
    """
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if visible_TT is not None:
        scores = scores + torch.where(visible_TT, 0.0, -torch.inf).to(scores.dtype)
    mixed: Tensor = scores.softmax(dim=-1).to(v.dtype) @ v
    return mixed


def masked_loss(model: Transformer, noised: Noised, mask_id: int) -> Tensor:
    """Weighted mean cross-entropy of the masked rows; the head runs on those rows alone."""
    noised = noised.to(model.head.weight.device)
    examples = len(noised.tokens_BT)
    x_TD = model.embed(noised.tokens_BT.flatten())
    attend = dense_attention(examples, noised.visible_TT)
    x_TD = model(x_TD, noised.positions_T.repeat(examples), attend)
    weights = noised.weights_BT.flatten()
    chosen = weights.nonzero().squeeze(1)
    logits = nn.functional.linear(x_TD[chosen], model.head.weight)
    logits[:, mask_id] = -torch.inf
    losses = cross_entropy(logits.float(), noised.targets_BT.flatten()[chosen], reduction="none")
    return (losses * weights[chosen]).sum() / weights.sum()
