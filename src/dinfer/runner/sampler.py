"""From hidden rows to commits: gathers the rows to decide of a batch, proposes, and lets each
decoder choose.

B windows, or parts of them, of one decoder, W longest of them, R rows to propose for in the whole
batch: the undecided ones, and under a decoder that is not monotone also those that it may change.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dinfer.engine.sequence import SequenceState
from dinfer.errors import EngineError
from dinfer.kernel.greedy import greedy_search
from dinfer.kernel.sampling import Guidance, RowSampling, SamplingExtras, kept, propose
from dinfer.nn.transformer import Transformer
from dinfer.step import Commit, Decoder, Part, Proposal, ProposalView, Rule, WindowState

Ids = npt.NDArray[np.int64]
_NONE: Ids = np.empty(0, np.int64)
_NOTHING = frozenset[str]()


@dataclass(slots=True)
class SampledStep:
    """What one sequence gets written: positions (rising), tokens, and the confidence of each;
    `back`: positions to mask again; `open`: whether its window stays open even without a mask;
    `drafted`: positions that stay masked, and `draft`: the tokens that they show. likely: the
    likeliest tokens there and their probabilities, each [P, TOP], if any request or decoder of the
    step asked for them.
    """

    positions: Ids
    tokens: Ids
    confidence: npt.NDArray[np.float32]
    back: Ids
    open: bool
    drafted: Ids
    draft: Ids
    likely: tuple[Ids, npt.NDArray[np.float32]] | None = None

    def before(self, limit: int) -> "SampledStep":
        """The same without what is committed from `limit` on."""
        if not len(self.positions) or self.positions[-1] < limit:
            return self
        keep = self.positions < limit
        return replace(
            self,
            positions=self.positions[keep],
            tokens=self.tokens[keep],
            confidence=self.confidence[keep],
            likely=None if self.likely is None else (self.likely[0][keep], self.likely[1][keep]),
        )


@dataclass(slots=True)
class DecodeRow:
    """One part of a sequence's window, a window to its decoder. owner: number of the sequence in
    the batch; rows: those of what was found.
    """

    owner: int
    sequence: SequenceState
    part: Part
    state: WindowState
    asked: Ids
    rows: slice


def sample_and_commit(
    batch: Many[SequenceState], hidden_TD: Tensor, model: Transformer, mask_id: int | None
) -> list[SampledStep | Exception]:
    """What each sequence of the batch commits, in its order, or why it cannot: an error that its
    iteration or its decoder raised, or logits that are not finite.
    """
    asked = [s.asked for s in batch]
    starts = list(itertools.accumulate(map(len, asked), initial=0))
    found = _found(batch, asked, starts, hidden_TD, model, mask_id)
    finite = found["confidence"].isfinite().cpu().numpy()
    failed: dict[int, Exception] = {}
    groups: dict[Decoder, list[DecodeRow]] = defaultdict(list)
    for number, sequence in enumerate(batch):
        rows = slice(starts[number], starts[number + 1])
        if not finite[rows].all():
            failed[number] = EngineError("The model's logits are not finite (NaN or infinite).")
            continue
        try:
            _show(sequence, asked[number], found, rows)
        except Exception as error:
            failed[number] = error
            continue
        for line in _lines(number, sequence, asked[number], starts[number]):
            groups[sequence.strategy.decoder].append(line)
    done: list[list[SampledStep]] = [[] for _ in batch]
    for decoder, lines in groups.items():
        for line, commit in zip(lines, _decided(decoder, lines, found), strict=True):
            if isinstance(commit, Exception):
                failed[line.owner] = commit
            else:
                done[line.owner].append(commit)
    return [failed.get(number) or _joined(parts) for number, parts in enumerate(done)]


def _decided(
    decoder: Decoder, lines: list[DecodeRow], found: dict[str, Tensor]
) -> Many[SampledStep | Exception]:
    """The commits of a decoder's lines. Where it raises, each line is tried by itself."""
    rule: Rule | None = getattr(decoder, "rule", None)
    try:
        return _by_rule(rule, lines, found) if rule else _decide(decoder, lines, found)
    except Exception as error:
        if len(lines) == 1:
            return [error]
        return [each for line in lines for each in _decided(decoder, [line], found)]


def _show(sequence: SequenceState, asked: Ids, found: dict[str, Tensor], rows: slice) -> None:
    """Lets an iteration see the proposals, if it wants to."""
    if sequence.curious:
        tokens, confidence = (found[x][rows].cpu().numpy() for x in ("tokens", "confidence"))
        sequence.consider(ProposalView(asked, tokens, confidence))


def _lines(owner: int, sequence: SequenceState, asked: Ids, start: int) -> Iterator[DecodeRow]:
    """The parts in which there is something to decide now."""
    if sequence.growth is not None and sequence.growth.wait:
        return
    assert sequence.window is not None
    for part, state in zip(sequence.window.split(), sequence.states, strict=True):
        low, high = asked.searchsorted((part.start, part.stop)).tolist()
        if low < high:
            rows = slice(start + low, start + high)
            yield DecodeRow(owner, sequence, part, state, asked[low:high], rows)


def _joined(parts: list[SampledStep]) -> SampledStep:
    """The commits of one sequence's parts as one."""
    if len(parts) == 1:
        return parts[0]
    blank = SampledStep(_NONE, _NONE, np.empty(0, np.float32), _NONE, False, _NONE, _NONE)
    positions, tokens, confidence, back, drafted, draft = (
        np.concatenate([getattr(blank, name), *(getattr(part, name) for part in parts)])
        for name in ("positions", "tokens", "confidence", "back", "drafted", "draft")
    )
    likely = [part.likely for part in parts if part.likely is not None]
    return SampledStep(
        positions,
        tokens,
        confidence,
        back,
        any(part.open for part in parts),
        drafted,
        draft,
        (np.concatenate([x[0] for x in likely]), np.concatenate([x[1] for x in likely]))
        if likely
        else None,
    )


def _found(
    batch: Many[SequenceState],
    asked: list[Ids],
    starts: list[int],
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
    row = rows[0] if len(rows) == 1 else np.concatenate(rows)
    row_R = torch.from_numpy(row).to(device)
    plain = not model.conditioned and all(s.plain for s in batch)
    if plain and (search := greedy_search(model.head)) is not None:
        tokens, confidence = search(hidden_TD, mask_id, row_R)
        return {"tokens": tokens, "confidence": confidence}
    hidden_RD = hidden_TD.index_select(0, row_R)
    if plain:
        return propose(hidden_RD, model.head, mask_id, _NOTHING, None)
    mixing = [s.mix > 0 or model.conditioned for s in batch]
    held = _held(batch, asked, device)
    needs = frozenset[str]().union(*(s.needs for s in batch))
    found = propose(
        hidden_RD,
        model.head,
        mask_id,
        needs,
        _sampling(batch, asked, needs, device),
        SamplingExtras(
            _allowed(batch, asked, model.shape.vocab, device),
            held,
            _guidance(batch, rows, hidden_TD),
            model.embedding.weight if any(mixing) else None,
        ),
    )
    if held is not None:
        found["held"] = held
    if offset < len(hidden_TD):
        # Shadow rows come behind the planned ones, in the order of the batch.
        shadow = [
            a.searchsorted(s.shadow) + n for s, a, n in zip(batch, asked, starts, strict=False)
        ]
        places = torch.from_numpy(np.concatenate(shadow)).to(device)
        found["kept"][places] = kept(hidden_TD[offset:], model.head, mask_id, found["held"][places])
    expected = found.pop("expected", None)
    for i, sequence in enumerate(batch):
        if expected is not None and mixing[i]:
            sequence.expect(asked[i], expected[starts[i] : starts[i + 1]])
    return found


def _by_rule(rule: Rule, lines: list[DecodeRow], found: dict[str, Tensor]) -> list[SampledStep]:
    """What the rule of a decoder commits; nothing needs laying out."""
    tokens, sure = found["tokens"].cpu().numpy(), found["confidence"].cpu().numpy()
    likely = [found[x].cpu().numpy() for x in ("top_tokens", "top_probs") if x in found]
    done = []
    for line in lines:
        confidence = sure[line.rows]
        chosen = rule(line.asked, confidence)
        if line.part.sure is not None:
            chosen = chosen[confidence[chosen] > line.part.sure]
        top = [each[line.rows][chosen] for each in likely]
        done.append(
            SampledStep(
                line.asked[chosen],
                tokens[line.rows][chosen],
                confidence[chosen],
                _NONE,
                False,
                _NONE,
                _NONE,
                (top[0], top[1]) if top else None,
            )
        )
    return done


def _decide(
    decoder: Decoder, lines: list[DecodeRow], found: dict[str, Tensor]
) -> list[SampledStep]:
    """Lays the lines out as [B, W], asks the decoder, and reads its choice back."""
    device = found["tokens"].device
    shape = len(lines), max(line.part.stop - line.part.start for line in lines)
    places = np.concatenate(
        [line.asked + (row * shape[1] - line.part.start) for row, line in enumerate(lines)]
    )
    # Which of the found rows a place shows; what nobody asked for shows any.
    index, masked = np.zeros(shape, np.int64), np.zeros(shape, bool)
    index.reshape(-1)[places] = np.concatenate(
        [np.arange(line.rows.start, line.rows.stop) for line in lines]
    )
    masked.reshape(-1)[places] = np.concatenate(
        [line.sequence.canvas.masked[line.asked] for line in lines]
    )
    editable = None
    if not decoder.monotone:
        editable = np.zeros(shape, bool)
        editable.reshape(-1)[places] = True
        editable &= ~masked
    index_N = torch.from_numpy(index.reshape(-1)).to(device)
    proposal = Proposal(
        **{
            name: x.index_select(0, index_N).view(*shape, *x.shape[1:]) for name, x in found.items()
        },
        editable=None if editable is None else torch.from_numpy(editable).to(device),
    )
    masked_BW = torch.from_numpy(masked).to(device)
    commit = decoder.commit(proposal, masked_BW, [line.state for line in lines])
    return _read(commit, proposal, masked, [line.part for line in lines])


def _read(
    commit: Commit, proposal: Proposal, masked: npt.NDArray[np.bool_], parts: list[Part]
) -> list[SampledStep]:
    """Brings a commit back to the host and to positions of the canvas."""
    sure = proposal.confidence if commit.confidence is None else commit.confidence
    mask, tokens, confidence = (x.cpu().numpy() for x in (commit.mask, commit.tokens, sure))
    top = [x.cpu().numpy() for x in (proposal.top_tokens, proposal.top_probs) if x is not None]
    draft = None if commit.draft is None else commit.draft.cpu().numpy()
    left = None if draft is None else masked & ~mask
    back = None if commit.back is None else commit.back.cpu().numpy()
    stays = None if commit.open is None else commit.open.tolist()
    done = []
    for i, part in enumerate(parts):
        chosen, returned = mask[i], _NONE if back is None else back[i].nonzero()[0] + part.start
        if part.sure is not None:
            chosen, returned = chosen & (confidence[i] > part.sure), _NONE
        columns = chosen.nonzero()[0]
        others = _NONE if left is None else left[i].nonzero()[0]
        done.append(
            SampledStep(
                columns + part.start,
                tokens[i, columns],
                confidence[i, columns],
                returned,
                # A part that was not filled after all is not held open for a look at it.
                stays is not None and stays[i] and len(columns) == mask[i].sum(),
                others + part.start,
                _NONE if draft is None else draft[i, others],
                (top[0][i, columns], top[1][i, columns]) if top else None,
            )
        )
    return done


def _guidance(batch: Many[SequenceState], rows: list[Ids], hidden_TD: Tensor) -> Guidance | None:
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


def _held(batch: Many[SequenceState], asked: list[Ids], device: torch.device) -> Tensor | None:
    """[R] tokens that stand in the rows, where some decoder may change them, else None."""
    if not any(s.canvas.revisable for s in batch):
        return None
    tokens = [s.canvas.tokens[a] for s, a in zip(batch, asked, strict=True)]
    return torch.from_numpy(np.concatenate(tokens)).to(device)


def _sampling(
    batch: Many[SequenceState], asked: list[Ids], needs: frozenset[str], device: torch.device
) -> RowSampling | None:
    """Each row's sampling, None where nothing depends on it; the step that keys the noise is the
    request's own count, so batch mates do not matter.
    """
    counts = [len(a) for a in asked]
    greedy = all(s.request.params.temperature == 0 for s in batch)
    requests = [s.request for s in batch]
    scaled = any(s.scale != 1 for s in batch)
    if greedy and not needs and not scaled:
        return None

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
    batch: Many[SequenceState], asked: list[Ids], vocab: int, device: torch.device
) -> Tensor | None:
    """[R, V] bool where some request forbids tokens, else None."""
    if not any(s.request.forbidden or s.request.params.min_tokens for s in batch):
        return None
    allowed = torch.ones(sum(map(len, asked)), vocab, dtype=torch.bool, device=device)
    start = 0
    for sequence, positions in zip(batch, asked, strict=True):
        request, canvas = sequence.request, sequence.canvas
        allowed[start : start + len(positions), list(request.forbidden)] = False
        early = int(positions.searchsorted(canvas.answer + request.params.min_tokens))
        allowed[start : start + early, list(canvas.ends)] = False
        start += len(positions)
    return allowed
