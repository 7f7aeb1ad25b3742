"""Who runs in the next step. Knows pages and rows; knows no phases."""

from collections import deque

from dinfer.engine.pool import Pool
from dinfer.engine.sequence import Sequence


class Scheduler:
    """First come, first admitted, as long as pages and places last; whoever is done leaves at once.

    max_sequences: most sequences running. max_rows: most rows in a step; where the running ones
    want more, they take turns (the longest waiting first, and the first always runs), so nobody
    starves. Those that are new go first: a first text is waited for, and nobody is new for more
    than a few steps.
    """

    def __init__(self, pool: Pool, max_sequences: int, max_rows: int) -> None:
        self.pool, self.max_sequences, self.max_rows = pool, max_sequences, max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def pick(self) -> list[Sequence]:
        """Admits what fits, then chooses the sequences of this step; each has its plan. Those with
        no work are left in `running` without one, for the engine to finish."""
        while self.waiting and len(self.running) < self.max_sequences:
            if not self._admit(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
        ready = sorted((s for s in self.running if s.advance()), key=lambda s: not s.is_new)
        batch: list[Sequence] = []
        rows = 0
        for sequence in ready:
            if not batch or rows + sequence.rows <= self.max_rows:
                batch.append(sequence)
                rows += sequence.rows
        if len(batch) < len(self.running):
            chosen = set(map(id, batch))
            self.running.sort(key=lambda s: id(s) in chosen)
        return batch

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a sequence its pages: those that hold the beginning of its text, and fresh ones. A
        short beginning is copied, since every step would gather what does not lie in one run.
        """
        prefixes, needed = self.pool.prefixes, sequence.pages_needed
        known = prefixes.find(sequence.opening) if prefixes and sequence.reuses else []
        if 0 < len(known) <= needed / 2 and (pages := self.pool.take_run(needed, known)):
            sequence.place(pages, len(known))
            return True
        self.pool.share(known)  # before taking, which may drop what nobody uses
        fresh = self.pool.take(needed - len(known))
        if fresh is None:
            self.pool.give_back(known)
            return False
        sequence.place(known + fresh, len(known))
        return True

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            if self.pool.prefixes and sequence.reuses:
                self.pool.prefixes.keep(sequence.final_text, sequence.pages)
            self.pool.give_back(sequence.pages)
            sequence.pages = []
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
