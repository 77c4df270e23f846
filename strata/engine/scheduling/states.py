"""Fixed states of sequences: where they are copied to, and where prompts are divided so that snapshots can be taken."""

from __future__ import annotations

from strata.cache.prefix import PrefixTree
from strata.cache.snapshots import Marks, Snapshots
from strata.engine.request import Sequence
from strata.engine.scheduling.builder import PlanBuilder

# A sequence that computes so many tokens behind its newest snapshot gets another: those that go on from it later have
# at most so many to compute again, and of 8k tokens sixteen copies are nothing beside their computing.
SNAPSHOT_TOKENS = 512


class States:
    """The state of a sequence that runs stands in the row of its slot, which each of its chunks changes in place. So
    there is none of fewer tokens, but for snapshots, and all of them are taken at the end of a chunk and of a page:

    - behind the last full page of a prompt that a repetition of it could begin with;
    - behind the last page that it has in common with what the tree knows, where others may part from it too;
    - and behind `SNAPSHOT_TOKENS` or more, where a chunk ends with a page; decodes, too.

    One more is taken before a chunk with drafts. If one of these is rejected, the sequence goes on from there and
    computes what was accepted anew. It waits until that is known.
    """

    def __init__(self, page_size: int, tree: PrefixTree | None, snapshots: Snapshots | None) -> None:
        """snapshots: None where no layer has a fixed state; none is taken without a tree, or without rows for them."""
        self._size, self._tree = page_size, tree
        self.there_are = snapshots is not None  # layers with a fixed state
        self._snapshots = snapshots or Snapshots(0, 0, page_size)
        # Of decodes, tokens between two snapshots: whole pages; 0: none are taken.
        self.every = 0
        if tree is not None and self._snapshots.count:
            self.every = -(-SNAPSHOT_TOKENS // page_size) * page_size

    def mark(self, sequence: Sequence, cached: int) -> None:
        """A sequence that waits could begin behind so many tokens: say where its chunks are to end."""
        if not self.there_are:
            return
        sequence.marks = Marks(newest=cached)
        if self.every and self._tree is not None:
            tokens, size = sequence.tokens, self._size
            ends = self._tree.depth(tokens, sequence.extra_key) * size, (len(tokens) - 1) // size * size
            sequence.marks.ends = tuple(sorted({end for end in ends if end > cached}))

    def wanted(self, sequence: Sequence, start: int) -> int:
        """Tokens of the chunk that begins at `start`, if the step has room for all of them."""
        ends = () if sequence.marks is None else sequence.marks.ends
        return next((end for end in ends if end > start), len(sequence.tokens)) - start

    def chunk(self, sequence: Sequence, start: int, builder: PlanBuilder) -> int:
        """Tokens of the chunk that begins at `start`; if not all that are wanted, it ends with a page, if it can."""
        wanted = self.wanted(sequence, start)
        count = builder.chunk(start, wanted)
        over = (start + count) % self._size if self.every and count < wanted else 0
        return count - over if count > over else count

    def before_drafts(self, sequence: Sequence, rows: int, builder: PlanBuilder) -> int:
        """How many of so many rows, all but the first behind drafts, a sequence can run and go back from."""
        marks, start = sequence.marks, sequence.computed
        if marks is None:
            return rows
        if self.every:  # the state behind a page of which a snapshot is due is that of a chunk that ends there
            rows = max(1, min(rows, self.every - 1 - start % self.every))
        row = self._snapshots.take() if rows > 1 else None
        if row is None:
            return 1
        marks.undo = row, start
        builder.states_before.append((sequence.slot, row))
        return rows

    def reject(self, sequence: Sequence) -> None:
        """A draft of the newest chunk of a running sequence is rejected."""
        if sequence.marks is not None:
            assert sequence.marks.undo is not None
            sequence.computed = sequence.marks.undo[1]
        else:
            sequence.computed -= 1

    def after_drafts(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """A sequence goes on, from where it has gone back to if a draft of it was rejected."""
        marks = sequence.marks
        if marks is not None and marks.undo is not None:
            row, tokens = marks.undo
            if sequence.computed == tokens:
                builder.states_before.append((row, sequence.slot))
            self._snapshots.give_back_undo(marks)

    def begin(self, sequence: Sequence, found: list[int], builder: PlanBuilder) -> None:
        """A sequence has got a slot and goes on behind the pages that were found for it."""
        if self.there_are and found:
            builder.states_before.append((self._snapshots.row(found[-1]), sequence.slot))

    def fork(self, sequence: Sequence, sample: Sequence, builder: PlanBuilder) -> None:
        """A sample has got a slot and goes on from what its sequence has at the end of the step."""
        if sequence.marks is not None:
            sample.marks = Marks(newest=sequence.marks.newest)
            builder.states_after.append((sequence.slot, sample.slot))

    def keep(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Take a snapshot at the end of the step, if one is due behind the tokens that are computed by then."""
        marks, computed = sequence.marks, sequence.computed
        if marks is None or not self.every or computed % self._size:
            return
        if computed not in marks.ends and computed - marks.newest < self.every:
            return
        if marks.row is None:
            marks.row = self._snapshots.take()
        if marks.row is not None:
            marks.newest = computed
            builder.states_after.append((sequence.slot, marks.row))

    def attach(self, sequence: Sequence, path: list[int]) -> None:
        """The tree keeps a sequence's own snapshot. path: the pages that it has of the sequence's tokens, or more."""
        marks = sequence.marks
        if marks is None or marks.row is None:
            return
        assert self._tree is not None
        place = marks.newest // self._size - 1
        if place < len(path) and path[place] in self._tree:
            self._snapshots.attach(path[place], marks)

    def drop(self, sequence: Sequence) -> None:
        """A sequence ends or pauses."""
        if sequence.marks is not None:
            self._snapshots.give_back(sequence.marks)
            self._snapshots.give_back_undo(sequence.marks)
        sequence.marks = None

    def clear(self) -> None:
        """Forget everything."""
        self._snapshots.clear()

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless rows and their holders agree."""
        marks = [sequence.marks for sequence in running if sequence.marks is not None]
        assert len(marks) == len(running) * self.there_are, "marks of a sequence are not there, or not its own"
        self._snapshots.check(marks, self._tree or ())
