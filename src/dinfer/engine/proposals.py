"""From hidden rows to commits: gathers the undecided rows of a batch, proposes, and lets each
decoder choose.

B sequences of one decoder, W longest window, R undecided rows of the whole batch.
"""

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.engine.sequence import Sequence
from dinfer.kernel.propose import RowSampling, propose
from dinfer.nn.transformer import Transformer
from dinfer.step import Decoder, Proposal

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Committed:
    """What one sequence gets written: positions, tokens, and the confidence of each."""

    positions: Ids
    tokens: Ids
    confidence: npt.NDArray[np.float32]


def commits(
    batch: Many[Sequence], hidden_TD: Tensor, model: Transformer, mask_id: int
) -> list[Committed]:
    """One Committed per sequence of the batch, in its order."""
    undecided, rows, offset = [], [], 0
    for sequence in batch:
        assert sequence.window is not None and sequence.plan is not None
        positions = sequence.canvas.undecided(sequence.window.start, sequence.window.stop)
        undecided.append(positions)
        rows.append(sequence.sources(positions) - sequence.plan.rows.start + offset)
        offset += len(sequence.plan.rows)
    chosen = torch.from_numpy(np.concatenate(rows)).to(hidden_TD.device)
    needs = frozenset[str]().union(*(s.strategy.decoder.needs for s in batch))
    sampling = _sampling(batch, undecided, hidden_TD.device)
    allowed = _allowed(batch, undecided, model.shape.vocab, hidden_TD.device)
    found = propose(hidden_TD[chosen], model.head, mask_id, needs, sampling, allowed)
    results: list[Committed | None] = [None] * len(batch)
    starts = np.cumsum([0, *map(len, undecided)])
    groups: dict[Decoder, list[int]] = defaultdict(list)
    for number, sequence in enumerate(batch):
        groups[sequence.strategy.decoder].append(number)
    for decoder, members in groups.items():
        parts = [slice(starts[i], starts[i + 1]) for i in members]
        group = [batch[i] for i in members]
        for i, done in zip(
            members,
            _decide(decoder, group, [undecided[i] for i in members], found, parts),
            strict=True,
        ):
            results[i] = done
    return [done for done in results if done is not None]


def _decide(
    decoder: Decoder,
    group: list[Sequence],
    undecided: list[Ids],
    found: dict[str, Tensor],
    parts: list[slice],
) -> list[Committed]:
    """Lays the group's rows out as [B, W], asks the decoder, and reads its choice back."""
    windows = [s.window for s in group]
    starts = [w.start if w else 0 for w in windows]
    width = max(w.stop - w.start for w in windows if w)
    line = np.repeat(np.arange(len(group)), [len(u) for u in undecided]) * width
    column = np.concatenate([u - start for u, start in zip(undecided, starts, strict=True)])
    device = found["tokens"].device
    place = torch.from_numpy(line + column).to(device)
    rows = (
        found
        if len(parts) == 1 and parts[0].stop - parts[0].start == len(found["tokens"])
        else None
    )
    rows = rows or {name: torch.cat([x[part] for part in parts]) for name, x in found.items()}

    def laid(x: Tensor) -> Tensor:
        blank = torch.zeros(len(group) * width, *x.shape[1:], dtype=x.dtype, device=device)
        return blank.index_copy_(0, place, x).view(len(group), width, *x.shape[1:])

    masked = laid(torch.ones(len(place), dtype=torch.bool, device=device))
    proposal = Proposal(**{name: laid(x) for name, x in rows.items()})
    states = [s.window_state for s in group if s.window_state is not None]
    commit = decoder.commit(proposal, masked, states)
    mask, tokens = commit.mask.cpu().numpy(), commit.tokens.cpu().numpy()
    confidence = proposal.confidence.cpu().numpy()
    done = []
    for i, start in enumerate(starts):
        columns = np.flatnonzero(mask[i])
        done.append(Committed(columns + start, tokens[i, columns], confidence[i, columns]))
    return done


def _sampling(batch: Many[Sequence], undecided: list[Ids], device: torch.device) -> RowSampling:
    """Each row's sampling; the step that keys the noise is the request's own count, so batch mates
    do not matter.
    """
    counts = [len(u) for u in undecided]
    greedy = all(s.request.params.temperature == 0 for s in batch)
    requests = [s.request for s in batch]

    def spread(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.repeat(values, counts)).to(device, dtype)

    return RowSampling(
        greedy=greedy,
        temperature=spread([r.params.temperature for r in requests], torch.float32),
        top_p=spread([r.params.top_p for r in requests], torch.float32),
        top_k=spread([r.params.top_k for r in requests], torch.int64),
        seed=spread([r.seed for r in requests], torch.int64),
        position=torch.from_numpy(np.concatenate(undecided)).to(device),
        step=spread([s.stats.forward_passes for s in batch], torch.int64),
    )


def _allowed(
    batch: Many[Sequence], undecided: list[Ids], vocab: int, device: torch.device
) -> Tensor | None:
    """[R, V] bool where some request forbids tokens, else None."""
    if not any(s.request.forbidden for s in batch):
        return None
    allowed = torch.ones(sum(map(len, undecided)), vocab, dtype=torch.bool, device=device)
    start = 0
    for sequence, positions in zip(batch, undecided, strict=True):
        allowed[start : start + len(positions), list(sequence.request.forbidden)] = False
        start += len(positions)
    return allowed
