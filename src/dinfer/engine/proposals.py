"""From hidden rows to commits: gathers the rows to decide of a batch, proposes, and lets each
decoder choose.

B sequences of one decoder, W longest window, R rows to decide of the whole batch: the undecided
ones, and under a decoder that is not monotone also those that it may change.
"""

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.engine.sequence import Sequence
from dinfer.kernel.propose import Guidance, RowSampling, kept, propose
from dinfer.nn.transformer import Transformer
from dinfer.step import Commit, Decoder, Proposal

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Committed:
    """What one sequence gets written: positions, tokens, and the confidence of each; `back`:
    positions to mask again; `open`: whether its window stays open even without a mask; `drafted`:
    positions that stay masked, and `draft`: the tokens that they show.
    """

    positions: Ids
    tokens: Ids
    confidence: npt.NDArray[np.float32]
    back: Ids
    open: bool
    drafted: Ids
    draft: Ids

    def before(self, limit: int) -> "Committed":
        """The same without what is committed from `limit` on."""
        keep = self.positions < limit
        if keep.all():
            return self
        return replace(
            self,
            positions=self.positions[keep],
            tokens=self.tokens[keep],
            confidence=self.confidence[keep],
        )


def commits(
    batch: Many[Sequence], hidden_TD: Tensor, model: Transformer, mask_id: int | None
) -> list[Committed]:
    """One Committed per sequence of the batch, in its order."""
    asked = [s.asked(s.window) for s in batch if s.window is not None]
    starts = np.cumsum([0, *map(len, asked)])
    found = _found(batch, asked, starts, hidden_TD, model, mask_id)
    asked = _narrowed(batch, asked, starts, found)
    results: list[Committed | None] = [None] * len(batch)
    groups: dict[Decoder, list[int]] = defaultdict(list)
    for number, sequence in enumerate(batch):
        groups[sequence.strategy.decoder].append(number)
    for decoder, members in groups.items():
        parts = [slice(starts[i], starts[i] + len(asked[i])) for i in members]
        group = [batch[i] for i in members]
        for i, done in zip(
            members,
            _decide(decoder, group, [asked[i] for i in members], found, parts),
            strict=True,
        ):
            results[i] = done
    return [done for done in results if done is not None]


def _found(
    batch: Many[Sequence],
    asked: list[Ids],
    starts: Ids,
    hidden_TD: Tensor,
    model: Transformer,
    mask_id: int | None,
) -> dict[str, Tensor]:
    """What the decoders need of each asked position, named as in Proposal, [R, ...]."""
    device, rows, offset = hidden_TD.device, [], 0
    for sequence, positions in zip(batch, asked, strict=True):
        assert sequence.plan is not None
        rows.append(sequence.plan.find(sequence.sources(positions)) + offset)
        offset += sequence.rows
    mixing = [s.mix > 0 or model.conditioned for s in batch]
    held = _held(batch, asked, device)
    found = propose(
        hidden_TD[torch.from_numpy(np.concatenate(rows)).to(device)],
        model.head,
        mask_id,
        frozenset[str]().union(*(s.strategy.decoder.needs for s in batch)),
        _sampling(batch, asked, device),
        _allowed(batch, asked, model.shape.vocab, device),
        held,
        _guidance(batch, rows, hidden_TD),
        model.embedding.weight if any(mixing) else None,
    )
    if held is not None:
        found["held"] = held
    # Shadow rows come behind the planned ones, in the order of the batch.
    shadow = [a.searchsorted(s.shadow) + n for s, a, n in zip(batch, asked, starts, strict=False)]
    if offset < len(hidden_TD):
        places = torch.from_numpy(np.concatenate(shadow)).to(device)
        found["kept"][places] = kept(hidden_TD[offset:], model.head, mask_id, found["held"][places])
    expected = found.pop("expected", None)
    for i, sequence in enumerate(batch):
        if expected is not None and mixing[i]:
            sequence.expect(asked[i], expected[starts[i] : starts[i + 1]])
    return found


def _narrowed(
    batch: Many[Sequence], asked: list[Ids], starts: Ids, found: dict[str, Tensor]
) -> list[Ids]:
    """Positions to decide once every iteration that wants to has ended its window sooner."""
    left = list(asked)
    for i, sequence in enumerate(batch):
        if sequence.narrows:
            part = slice(starts[i], starts[i + 1])
            tokens, confidence = (found[x][part].cpu().numpy() for x in ("tokens", "confidence"))
            sequence.narrow(asked[i], tokens, confidence)
            assert sequence.window is not None
            left[i] = asked[i][: asked[i].searchsorted(sequence.window.stop)]
    return left


def _decide(
    decoder: Decoder,
    group: list[Sequence],
    asked: list[Ids],
    found: dict[str, Tensor],
    parts: list[slice],
) -> list[Committed]:
    """Lays the group's rows out as [B, W], asks the decoder, and reads its choice back."""
    windows = [s.window for s in group]
    starts = [w.start if w else 0 for w in windows]
    width = max(w.stop - w.start for w in windows if w)
    line = np.repeat(np.arange(len(group)), [len(a) for a in asked]) * width
    column = np.concatenate([a - start for a, start in zip(asked, starts, strict=True)])
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

    blank = np.concatenate([s.canvas.masked[a] for s, a in zip(group, asked, strict=True)])
    masked = laid(torch.from_numpy(blank).to(device))
    editable = None if decoder.monotone else laid(torch.from_numpy(~blank).to(device))
    proposal = Proposal(**{name: laid(x) for name, x in rows.items()}, editable=editable)
    states = [s.window_state for s in group if s.window_state is not None]
    commit = decoder.commit(proposal, masked, states)
    sure = proposal.confidence if commit.confidence is None else commit.confidence
    return _read(commit, sure, masked, starts)


def _read(
    commit: Commit, confidence_BW: Tensor, masked_BW: Tensor, starts: list[int]
) -> list[Committed]:
    """Brings a commit back to the host and to positions of the canvas."""
    mask, tokens = commit.mask.cpu().numpy(), commit.tokens.cpu().numpy()
    confidence = confidence_BW.cpu().numpy()
    left, draft = np.zeros_like(mask), tokens
    if commit.draft is not None:
        left, draft = masked_BW.cpu().numpy() & ~mask, commit.draft.cpu().numpy()
    back = np.zeros_like(mask) if commit.back is None else commit.back.cpu().numpy()
    stays = [False] * len(starts) if commit.open is None else commit.open.tolist()
    done = []
    for i, start in enumerate(starts):
        columns, others = np.flatnonzero(mask[i]), np.flatnonzero(left[i])
        done.append(
            Committed(
                columns + start,
                tokens[i, columns],
                confidence[i, columns],
                np.flatnonzero(back[i]) + start,
                stays[i],
                others + start,
                draft[i, others],
            )
        )
    return done


def _guidance(batch: Many[Sequence], rows: list[Ids], hidden_TD: Tensor) -> Guidance | None:
    """The guided rows among those that are proposed for, with their hidden rows of the second run;
    None where no request is guided.
    """
    scales = [s.request.params.guidance for s in batch]
    if not any(scales):
        return None
    second = [r + s.rows // 2 for r, s in zip(rows, batch, strict=True)]
    each = np.repeat(scales, [len(r) for r in rows])
    places = np.flatnonzero(each)
    hidden = torch.from_numpy(np.concatenate(second)[places]).to(hidden_TD.device)
    scale = torch.from_numpy(each[places]).to(hidden_TD.device, torch.float32)
    return Guidance(places, hidden_TD[hidden], scale)


def _held(batch: Many[Sequence], asked: list[Ids], device: torch.device) -> Tensor | None:
    """[R] tokens that stand in the rows, where some decoder may change them, else None."""
    if not any(s.canvas.revisable for s in batch):
        return None
    tokens = [s.canvas.tokens[a] for s, a in zip(batch, asked, strict=True)]
    return torch.from_numpy(np.concatenate(tokens)).to(device)


def _sampling(batch: Many[Sequence], asked: list[Ids], device: torch.device) -> RowSampling:
    """Each row's sampling; the step that keys the noise is the request's own count, so batch mates
    do not matter.
    """
    counts = [len(a) for a in asked]
    greedy = all(s.request.params.temperature == 0 for s in batch)
    requests = [s.request for s in batch]
    scaled = any(s.scale != 1 for s in batch)

    def spread(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.repeat(values, counts)).to(device, dtype)

    return RowSampling(
        greedy=greedy,
        temperature=spread([r.params.temperature for r in requests], torch.float32),
        top_p=spread([r.params.top_p for r in requests], torch.float32),
        top_k=spread([r.params.top_k for r in requests], torch.int64),
        seed=spread([r.seed for r in requests], torch.int64),
        position=torch.from_numpy(np.concatenate(asked)).to(device),
        step=spread([s.stats.forward_passes for s in batch], torch.int64),
        scale=spread([s.scale for s in batch], torch.float32) if scaled else None,
    )


def _allowed(
    batch: Many[Sequence], asked: list[Ids], vocab: int, device: torch.device
) -> Tensor | None:
    """[R, V] bool where some request forbids tokens, else None."""
    if not any(s.request.forbidden for s in batch):
        return None
    allowed = torch.ones(sum(map(len, asked)), vocab, dtype=torch.bool, device=device)
    start = 0
    for sequence, positions in zip(batch, asked, strict=True):
        allowed[start : start + len(positions), list(sequence.request.forbidden)] = False
        start += len(positions)
    return allowed
