"""The fused head: a token and its confidence for each row that needs one.

R rows, D hidden, V vocabulary. Logits exist for GROUP rows at a time, so no [rows, V] matrix of a
large batch is kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dinfer.kernel.noise import uniform

GROUP = 64
"""Rows whose logits exist at once."""


@dataclass(frozen=True)
class RowSampling:
    """Sampling of each row: temperature, top_p [R] float32; top_k, seed, position, step [R] int64;
    or greedy.
    """

    greedy: bool
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor
    step: Tensor

    def part(self, rows: slice) -> "RowSampling":
        """The same for some of the rows."""
        tensors = (self.temperature, self.top_p, self.top_k, self.seed, self.position, self.step)
        return RowSampling(self.greedy, *(x[rows] for x in tensors))


def propose(
    hidden_RD: Tensor,
    head: nn.Module,
    mask_id: int,
    needs: Iterable[str],
    sampling: RowSampling,
    allowed_RV: Tensor | None = None,
) -> dict[str, Tensor]:
    """Tokens [R], confidence [R] (probability of the token under the raw logits, float32), and
    what `needs` names.

    The mask token is never proposed and has no probability. `allowed_RV` (bool) limits the choice
    of tokens and leaves the confidence alone. `needs` may name entropy, margin, noise [R] and
    logits [R, V] float32.
    """
    needs = frozenset(needs)
    parts = []
    for start in range(0, len(hidden_RD), GROUP):
        rows = slice(start, start + GROUP)
        allowed = None if allowed_RV is None else allowed_RV[rows]
        logits = head(hidden_RD[rows]).float()
        logits[:, mask_id] = -torch.inf
        parts.append(_one_group(logits, needs, sampling.part(rows), allowed))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _one_group(
    logits: Tensor, needs: frozenset[str], sampling: RowSampling, allowed: Tensor | None
) -> dict[str, Tensor]:
    total = logits.logsumexp(dim=1)
    choice = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    if sampling.greedy:
        best, tokens = choice.max(dim=1)
    else:
        tokens = sample(choice, sampling)
        best = logits.gather(1, tokens[:, None]).squeeze(1)
    found = {"tokens": tokens, "confidence": (best - total).exp()}
    if "entropy" in needs:
        p = (logits - total[:, None]).exp()
        found["entropy"] = total - torch.where(p > 0, p * logits, 0.0).sum(dim=1)
    if "margin" in needs:
        two = (logits.topk(2, dim=1).values - total[:, None]).exp()
        found["margin"] = two[:, 0] - two[:, 1]
    if "noise" in needs:
        # Step -1 - n keeps this stream apart from the one that samples tokens.
        found["noise"] = uniform(sampling.seed, sampling.position, -1 - sampling.step, 1).squeeze(1)
    if "logits" in needs:
        found["logits"] = logits
    return found


def sample(logits_RV: Tensor, sampling: RowSampling) -> Tensor:
    """One token per row: the largest of logits / temperature + Gumbel noise among top-k and top-p;
    temperature 0: argmax.
    """
    warm = sampling.temperature > 0
    # Less the row's best first: a tiny temperature then sends the others to -inf and not all to
    # +inf.
    below = logits_RV - logits_RV.amax(dim=1, keepdim=True)
    scaled = below / torch.where(warm, sampling.temperature, 1.0)[:, None]
    scaled = _top_k(scaled, sampling.top_k)
    scaled = _top_p(scaled, sampling.top_p)
    noise = uniform(sampling.seed, sampling.position, sampling.step, logits_RV.shape[1])
    gumbel = -(-noise.log()).log()
    return torch.where(warm[:, None], scaled + gumbel, logits_RV).argmax(dim=1)


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
