"""Snapshots of fixed states, which the prefix tree keeps for some of its pages, so that sequences can begin there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Marks:
    """Of a sequence: where its prompt is divided, and the snapshot of it that the tree does not have yet.

    ends: numbers of tokens, ascending, behind which a chunk is to end with a snapshot. newest: tokens behind which the
    newest snapshot was taken, or with which the sequence began. row: of the snapshot that is its own, taken behind
    `newest` tokens; None: the tree has it, or there is none. undo: row and tokens of the one to which it goes back if
    a draft behind it is rejected.
    """

    ends: tuple[int, ...] = ()
    newest: int = 0
    row: int | None = None
    undo: tuple[int, int] | None = None


class Snapshots:
    """Who has each row behind those of running sequences. A row is free, or a sequence's own, or the tree keeps it for
    a page: the state behind the last token of that page.

    Rows hold what steps write there in the order of their plans, so one that is taken may be copied to at the end of
    the next step, whoever still copies from it at that step's beginning.
    """

    def __init__(self, first: int, count: int, page_size: int) -> None:
        """Rows [first, first + count)."""
        self.first, self.count, self.page_size = first, count, page_size
        self.clear()

    def clear(self) -> None:
        """All rows are free."""
        self._free = list(range(self.first + self.count - 1, self.first - 1, -1))
        self._of: OrderedDict[int, int] = OrderedDict()  # by page; the one that was used longest ago comes first

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    @property
    def kept(self) -> int:
        """Rows that the tree keeps."""
        return len(self._of)

    def take(self) -> int | None:
        """A row for a sequence's own: a free one, else the one of the tree that was used longest ago, if any."""
        if not self._free and self._of:
            self.detach(next(iter(self._of)))
        return self._free.pop() if self._free else None

    def give_back(self, marks: Marks) -> None:
        """A sequence has no use for its own any more."""
        if marks.row is not None:
            self._free.append(marks.row)
            marks.row = None

    def give_back_undo(self, marks: Marks) -> None:
        """A sequence does not go back any more."""
        if marks.undo is not None:
            self._free.append(marks.undo[0])
            marks.undo = None

    def attach(self, page: int, marks: Marks) -> None:
        """The tree keeps a sequence's own for a page, unless it has one for it already, which is counted as used."""
        if page in self._of:
            self._of.move_to_end(page)
            self.give_back(marks)
        elif marks.row is not None:
            self._of[page], marks.row = marks.row, None

    def row(self, page: int) -> int:
        """Where the state behind a page stands, which is used now."""
        self._of.move_to_end(page)
        return self._of[page]

    def covered(self, path: Sequence[int], most: int) -> int:
        """See `Attached`: the deepest page with a snapshot."""
        return next((end for end in range(most, 0, -1) if path[end - 1] in self._of), 0)

    def detach(self, page: int) -> None:
        """See `Attached`."""
        row = self._of.pop(page, None)
        if row is not None:
            self._free.append(row)

    def check(self, running: Iterable[Marks], tree: Iterable[int]) -> None:
        """Raise AssertionError unless each row is somebody's once, and the tree has the pages of all it keeps."""
        assert self._of.keys() <= set(tree), "a snapshot is kept for a page that is not in the tree"
        own = [(marks.row, marks.undo[0] if marks.undo else None) for marks in running]
        rows = sorted([*self._free, *self._of.values(), *(row for rows in own for row in rows if row is not None)])
        assert rows == list(range(self.first, self.first + self.count)), "a snapshot's row is lost or held twice"
