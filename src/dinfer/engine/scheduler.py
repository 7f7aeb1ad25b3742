"""Who runs in the next step. Knows pages and rows; knows no phases."""

from collections import deque

from dinfer.engine.sequence import SequenceState
from dinfer.kv.pool import KVCachePool

PATIENCE = 8
"""Steps in a row in which a sequence may be passed over for new ones."""


class Scheduler:
    """First come, first admitted, as long as pages and places last; whoever is done leaves at once.

    max_sequences: most sequences running. max_rows: most rows in a step; where the running ones
    want more, they take turns (the longest waiting first, and the first always runs). New sequences
    go first, since their callers wait for a first text, but a sequence that was passed over in
    PATIENCE steps goes before them. So no sequence is passed over in more than PATIENCE +
    max_sequences steps in a row.
    """

    def __init__(self, pool: KVCachePool, max_sequences: int, max_rows: int) -> None:
        self.pool, self.max_sequences, self.max_rows = pool, max_sequences, max_rows
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def pick(self) -> list[SequenceState]:
        """Admits what fits, then chooses the sequences of this step; each has its plan. Those with
        no work are left in `running` without one, for the engine to finish."""
        while self.waiting and len(self.running) < self.max_sequences:
            if not self._admit(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
        ready = sorted(filter(_advances, self.running), key=_priority)
        batch: list[SequenceState] = []
        rows = 0
        for sequence in ready:
            if not batch or rows + sequence.rows <= self.max_rows:
                batch.append(sequence)
                rows += sequence.rows
                sequence.passed_over = 0
            else:
                sequence.passed_over += 1
        if len(batch) < len(self.running):
            chosen = set(map(id, batch))
            self.running.sort(key=lambda s: id(s) in chosen)
        return batch

    def _admit(self, sequence: SequenceState) -> bool:
        """Gives a sequence its pages: those that hold the beginning of its text, and fresh ones. A
        short beginning is copied, since every step would gather what does not lie in one run.
        """
        prefix_cache, needed = self.pool.prefix_cache, sequence.pages_needed
        known: list[int] = []
        if prefix_cache and sequence.reuses:
            known = prefix_cache.match(sequence.opening, sequence.request.cache_salt)
        if 0 < len(known) <= needed / 2 and (pages := self.pool.allocate_contiguous(needed, known)):
            sequence.place(pages, len(known))
            return True
        self.pool.incref(known)  # before taking, which may drop what nobody uses
        fresh = self.pool.allocate(needed - len(known))
        if fresh is None:
            self.pool.free_pages(known)
            return False
        sequence.place(known + fresh, len(known))
        return True

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out, wherever it is, and frees its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            if self.pool.prefix_cache and sequence.reuses and sequence.error is None:
                salt = sequence.request.cache_salt
                self.pool.prefix_cache.insert(sequence.final_text, sequence.pages, salt)
            self.pool.free_pages(sequence.pages)
            sequence.pages = []
        elif sequence in self.waiting:
            self.waiting.remove(sequence)


def _advances(sequence: SequenceState) -> bool:
    """Whether there is a step to run. What a strategy raises is noted for the engine: it ends that
    request alone.
    """
    try:
        return sequence.advance()
    except Exception as error:
        sequence.error = error
        return False


def _priority(sequence: SequenceState) -> tuple[int, bool]:
    """Sorts first who was passed over too often (the longest first), then the new ones."""
    overdue = sequence.passed_over if sequence.passed_over >= PATIENCE else 0
    return -overdue, not sequence.is_new
