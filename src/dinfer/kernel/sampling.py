"""The fused head: a token and its confidence for each row that needs one.

R rows, D hidden, V vocabulary. Logits exist for GROUP rows at a time, so no [rows, V] matrix of a
large batch is kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.kernel.greedy import Head, greedy_search, greedy_tokens, logits_of, normaliser
from dinfer.kernel.noise import random_tokens, uniform
from dinfer.step import NUM_TOP

GROUP = 64
"""Rows whose logits exist at once."""


@dataclass(frozen=True)
class RowSampling:
    """Sampling of each row: temperature, top_p [R] float32; top_k, seed, position, step [R] int64;
    or greedy. scale [R] float32: logits are divided by it before all else (None = by 1).
    """

    greedy: bool
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor
    step: Tensor
    scale: Tensor | None = None

    def part(self, rows: slice) -> "RowSampling":
        """The same for some of the rows."""
        tensors = (self.temperature, self.top_p, self.top_k, self.seed, self.position, self.step)
        part = RowSampling(self.greedy, *(x[rows] for x in tensors))
        return part if self.scale is None else replace(part, scale=self.scale[rows])


@dataclass(frozen=True)
class Guidance:
    """Unsupervised classifier-free guidance (arXiv 2410.18514) of some rows.

    rows [G] int64, rising, on the host; hidden_GD: the same rows of the run in which the given text
    is masked; scale_G float32: 0 would leave the logits as they are.
    """

    rows: npt.NDArray[np.int64]
    hidden_GD: Tensor
    scale_G: Tensor


@dataclass(frozen=True)
class SamplingExtras:
    """What some requests of a batch want of all rows; None where none does.

    allowed_RV (bool) limits the choice of tokens and leaves the confidence alone. held_R: tokens
    that stand in the rows, whose probability is asked for. embedding_VD: asks for the embedding
    that is expected.
    """

    allowed_RV: Tensor | None = None
    held_R: Tensor | None = None
    guidance: Guidance | None = None
    embedding_VD: Tensor | None = None


def propose(
    hidden_RD: Tensor,
    head: Head,
    mask_id: int | None,
    needs: Iterable[str],
    sampling: RowSampling | None,
    extras: SamplingExtras = SamplingExtras(),
) -> dict[str, Tensor]:
    """Tokens [R], confidence [R] (probability of the token under the raw logits, float32), and
    what `needs` names.

    The mask token, where there is one, is never proposed and has no probability. `needs` may name
    entropy, margin, noise, random [R], logits [R, V], top (top_tokens and top_probs [R, TOP]) and,
    after temperature, top-k and top-p, filtered_confidence, filtered_entropy and filtered_margin
    [R]. `held_R` gives kept [R], the probability of these tokens (0 for the mask token). Under
    `guidance` the guided logits count as the raw ones. `embedding_VD` gives expected [R, D], the
    mean embedding under the raw probabilities. sampling: None = the likeliest tokens, where `needs`
    is empty or names what does not depend on it.
    """
    needs, search = frozenset(needs), greedy_search(head)
    greedy = sampling is None or (sampling.greedy and sampling.scale is None)
    plain = all(x is None for x in (extras.guidance, extras.held_R, extras.embedding_VD))
    if greedy and plain and needs <= {"noise"}:
        if search is not None and extras.allowed_RV is None:
            tokens, confidence = search(hidden_RD, mask_id)
        else:
            tokens, confidence = greedy_tokens(hidden_RD, head, mask_id, extras.allowed_RV)
        found = {"tokens": tokens, "confidence": confidence}
        if sampling is not None and needs:
            found["noise"] = _noise(sampling)
        if extras.allowed_RV is None:
            return found
    else:
        found = _in_groups(hidden_RD, head, mask_id, needs, sampling, extras)
    if search is not None and found:
        rows = _searchable(len(hidden_RD), sampling, extras)
        found["tokens"][rows], found["confidence"][rows] = search(hidden_RD[rows], mask_id)
        if "top" in needs:
            # A token has one probability, whichever of the two found it.
            own = found["top_tokens"] == found["tokens"][:, None]
            found["top_probs"] = found["top_probs"].where(~own, found["confidence"][:, None])
    return found


def _searchable(count: int, sampling: RowSampling | None, extras: SamplingExtras) -> Tensor:
    """Rows that only want the likeliest token. A head's own search rounds in its own way, so it
    answers these whoever is in the batch, and no others.
    """
    rows = torch.ones(count, dtype=torch.bool)
    if sampling is not None:
        rows &= sampling.temperature == 0
        rows &= True if sampling.scale is None else sampling.scale == 1
    if extras.allowed_RV is not None:
        rows &= extras.allowed_RV.all(dim=1)
    if extras.guidance is not None:
        rows[torch.from_numpy(extras.guidance.rows)] = False
    return rows.nonzero().squeeze(1)


def _in_groups(
    hidden_RD: Tensor,
    head: Head,
    mask_id: int | None,
    needs: frozenset[str],
    sampling: RowSampling | None,
    extras: SamplingExtras,
) -> dict[str, Tensor]:
    """From all logits of the rows, GROUP at a time."""
    held, embedding = extras.held_R, extras.embedding_VD
    parts = []
    for start in range(0, len(hidden_RD), GROUP):
        rows = slice(start, start + GROUP)
        allowed = None if extras.allowed_RV is None else extras.allowed_RV[rows]
        logits = logits_of(hidden_RD[rows], head)
        if extras.guidance is not None:
            _guide(logits, head, extras.guidance, start)
        some = None if sampling is None else sampling.part(rows)
        if some is not None and some.scale is not None:
            logits /= some.scale[:, None]
        if mask_id is not None:
            logits[:, mask_id] = -torch.inf
        part = _one_group(logits, needs, some, allowed)
        if held is not None:
            part["kept"] = _probability(logits, held[rows])
        if embedding is not None:
            part["expected"] = logits.softmax(dim=1).to(embedding.dtype) @ embedding
        parts.append(part)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def kept(hidden_RD: Tensor, head: Head, mask_id: int | None, held_R: Tensor) -> Tensor:
    """Probability [R] of given tokens under the raw logits, float32."""
    parts = []
    for start in range(0, len(hidden_RD), GROUP):
        rows = slice(start, start + GROUP)
        logits = logits_of(hidden_RD[rows], head)
        if mask_id is not None:
            logits[:, mask_id] = -torch.inf
        parts.append(_probability(logits, held_R[rows]))
    return torch.cat(parts)


def _guide(logits_RV: Tensor, head: Head, guidance: Guidance, start: int) -> None:
    """`u + (1 + scale) (c - u)` in place, for the guided ones of the rows from `start` on."""
    part = slice(*guidance.rows.searchsorted((start, start + len(logits_RV))))
    if part.start < part.stop:
        rows = torch.from_numpy(guidance.rows[part] - start).to(logits_RV.device)
        without = logits_of(guidance.hidden_GD[part], head)
        scale = 1 + guidance.scale_G[part, None]
        logits_RV[rows] = without + scale * (logits_RV[rows] - without)


def _one_group(
    logits: Tensor, needs: frozenset[str], sampling: RowSampling | None, allowed: Tensor | None
) -> dict[str, Tensor]:
    most, total = normaliser(logits)
    choice = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    if sampling is None or sampling.greedy:
        best, tokens = choice.max(dim=1)
    else:
        tokens = sample(choice, sampling)
        best = logits.gather(1, tokens[:, None]).squeeze(1)
    found = {"tokens": tokens, "confidence": (best - most).exp() / total}
    if "entropy" in needs:
        found["entropy"] = _entropy(logits)
    if "margin" in needs:
        found["margin"] = _margin(logits)
    if sampling is not None and needs & FILTERED.keys():
        # What top-k and top-p would leave; the token itself is likely in it, but forced tokens and
        # temperature 0 may choose others.
        left = apply_top_k_top_p(choice, sampling)
        found |= {name: FILTERED[name](left, tokens) for name in needs & FILTERED.keys()}
    if "top" in needs:
        found["top_tokens"] = choice.topk(min(NUM_TOP, logits.shape[1]), dim=1).indices
        above = logits.gather(1, found["top_tokens"]) - most[:, None]
        found["top_probs"] = above.exp() / total[:, None]
    if sampling is not None and "noise" in needs:
        found["noise"] = _noise(sampling)
    if sampling is not None and "random" in needs:
        step = sampling.step + 1  # the canvas itself was drawn before step 0
        found["random"] = random_tokens(sampling.seed, sampling.position, step, logits.shape[1])
    if "logits" in needs:
        found["logits"] = logits
    return found


def _noise(sampling: RowSampling) -> Tensor:
    """Of the decoders: step -1 - n keeps this stream apart from the one that samples tokens."""
    return uniform(sampling.seed, sampling.position, -1 - sampling.step, 1).squeeze(1)


def _entropy(logits_RV: Tensor) -> Tensor:
    total = logits_RV.logsumexp(dim=1)
    p = (logits_RV - total[:, None]).exp()
    # Rounding may leave the entropy of a certain token just below 0.
    return (total - torch.where(p > 0, p * logits_RV, 0.0).sum(dim=1)).clamp_min(0.0)


def _margin(logits_RV: Tensor) -> Tensor:
    two = (logits_RV.topk(2, dim=1).values - logits_RV.logsumexp(dim=1)[:, None]).exp()
    return two[:, 0] - two[:, 1]


def _probability(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    return (logits_RV.gather(1, tokens_R[:, None]).squeeze(1) - logits_RV.logsumexp(dim=1)).exp()


FILTERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filtered_confidence": _probability,
    "filtered_entropy": lambda logits, tokens: _entropy(logits),
    "filtered_margin": lambda logits, tokens: _margin(logits),
}
"""Measures of the distribution that tokens are drawn from."""


def sample(logits_RV: Tensor, sampling: RowSampling) -> Tensor:
    """One token per row: the largest of logits / temperature + Gumbel noise among top-k and top-p;
    temperature 0: argmax.
    """
    noise = uniform(sampling.seed, sampling.position, sampling.step, logits_RV.shape[1])
    gumbel = -(-noise.log()).log()
    warm = (sampling.temperature > 0)[:, None]
    return torch.where(warm, apply_top_k_top_p(logits_RV, sampling) + gumbel, logits_RV).argmax(
        dim=1
    )


def apply_top_k_top_p(logits_RV: Tensor, sampling: RowSampling) -> Tensor:
    """Logits over the temperature (as they are at temperature 0), -inf outside top-k and top-p."""
    warm = sampling.temperature > 0
    # Less the row's best first: a tiny temperature then sends the others to -inf and not all to
    # +inf.
    below = logits_RV - logits_RV.amax(dim=1, keepdim=True)
    scaled = below / torch.where(warm, sampling.temperature, 1.0)[:, None]
    return _top_p(_top_k(scaled, sampling.top_k), sampling.top_p)


def _top_k(logits_RV: Tensor, top_k_R: Tensor) -> Tensor:
    most = int(top_k_R.max())
    if most == 0:
        return logits_RV
    values = logits_RV.topk(min(most, logits_RV.shape[1]), dim=1).values
    place = (top_k_R - 1).clamp(0, values.shape[1] - 1)[:, None]
    least = torch.where(top_k_R[:, None] > 0, values.gather(1, place), -torch.inf)
    return logits_RV.masked_fill(logits_RV < least, -torch.inf)


def _top_p(logits_RV: Tensor, top_p_R: Tensor) -> Tensor:
    if bool((top_p_R >= 1).all()):
        return logits_RV
    ordered, order = logits_RV.sort(dim=1, descending=True)
    mass = ordered.softmax(dim=1).cumsum(dim=1)
    # The token that carries the mass over top_p stays in.
    beyond = (mass - ordered.softmax(dim=1)) >= top_p_R[:, None]
    beyond &= (top_p_R < 1)[:, None]
    beyond[:, 0] = False
    return logits_RV.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
