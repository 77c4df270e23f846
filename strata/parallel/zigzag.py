"""Which tokens of packed documents each rank takes, and which of its queries see which keys of another rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from strata.parallel.families import span


@dataclass(frozen=True)
class ZigzagChunk:
    """Tokens of one document that a rank holds side by side.

    row: where they begin among the rank's rows. start: the position of the first one in its document. length: how many.
    """

    row: int
    start: int
    length: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.length)


@dataclass(frozen=True)
class Block:
    """Queries of this rank and keys of another whose scores are computed together.

    offset: position of the first query less that of the first key. masked: whether some pair of them is hidden.
    """

    queries: slice
    keys: slice
    offset: int
    masked: bool


@dataclass(frozen=True)
class Zigzag:
    """Documents of these lengths, each cut into 2 * ranks chunks of which rank r has r and 2 * ranks - 1 - r.

    Chunks of a document differ by one token at most, so a short document leaves some of them empty.
    """

    lengths: tuple[int, ...]
    ranks: int

    def counts(self, rank: int) -> list[int]:
        """Of each document, how many tokens the rank has."""
        return [sum(end - start for start, end in self._spans(length, rank)) for length in self.lengths]

    def rows(self, rank: int) -> list[int]:
        """Where in the packed batch each token of the rank stands: document by document, early chunk before late."""
        found: list[int] = []
        first = 0
        for length in self.lengths:
            for start, end in self._spans(length, rank):
                found.extend(range(first + start, first + end))
            first += length
        return found

    @cached_property
    def tokens(self) -> list[int]:
        """How many tokens each rank has."""
        return [sum(self.counts(rank)) for rank in range(self.ranks)]

    def blocks(self, rank: int, source: int, window: int) -> list[Block]:
        """All pairs of `rank`'s queries and `source`'s keys that are seen, in blocks; a chunk with itself first.

        window: how many positions a query sees, its own included.
        """
        found = []
        for own, others in zip(self.chunks(rank), self.chunks(source), strict=True):
            for query in own:
                for key in others:
                    offset = query.start - key.start
                    farthest = offset + query.length - 1
                    nearest = offset - key.length + 1
                    if farthest < 0 or nearest >= window:
                        continue
                    masked = nearest < 0 or farthest >= window
                    found.append(Block(query.rows, key.rows, offset, masked))
        return sorted(found, key=lambda block: block.offset != 0)

    def chunks(self, rank: int) -> Iterator[list[ZigzagChunk]]:
        """Of each document the rank's chunks that have tokens."""
        row = 0
        for length in self.lengths:
            chunks = []
            for start, end in self._spans(length, rank):
                if end > start:
                    chunks.append(ZigzagChunk(row, start, end - start))
                row += end - start
            yield chunks

    def _spans(self, length: int, rank: int) -> list[tuple[int, int]]:
        parts = 2 * self.ranks
        return [span(length, parts, rank), span(length, parts, parts - 1 - rank)]
