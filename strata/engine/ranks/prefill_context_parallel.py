"""Which tokens of a step each of several ranks runs that hold the model alike and divide its prompts (context
parallelism): the host's side of `strata.graph.ranks.shard_tokens`.

A rank's share of a sequence is a sequence to it: with the same block table, and a length up to the share's own end. The
query at a later position sees more keys, so of a prompt cut into 2 * ranks pieces a rank takes one from the front and
one from the back, whatever lies in pages before it. All then see equally many keys; one piece each would leave the last
of two ranks with 6 % more than its share of a prompt of 65,536 tokens in chunks of 8,192, of eight with 11 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata.cache.block_tables import BlockTables
from strata.cache.tables import BufferShape, Share, StepBuffer
from strata.cost.step_times import StepTimes
from strata.engine.plan import PlanArrays
from strata.kernels.attention.query_chunks import keys_in_blocks

CONTEXT_AXIS = "cp"

# Rows of a rank are a multiple of this, so that kernels need no variant for other numbers.
_ROW_MULTIPLE = 16
# Of an H200, estimated: shorter pieces leave kernels of attention half empty.
_PIECE_ON_CUDA = 128
# A token takes a CPU so long that a message pays soon.
_PIECE_ON_CPU = 4

# Where times are not known, the rank with the most tokens may have so many times the mean: two ranks that share a step
# so save a quarter of its products.
_UNEVEN = 1.5

# Ranks tell each other whole numbers of this; the time of a pair of a query and a key is about 1e-9 s.
_TOLD_SECONDS = 1e-18
_MAX_TOLD = (1 << 63) - 1

Int32Array = NDArray[np.int32]


class Piece(NamedTuple):
    """Tokens [first, first + count) of a chunk of a step."""

    chunk: int
    first: int
    count: int  # type: ignore[assignment]  # hides the method of tuple, which nobody calls


@dataclass(frozen=True)
class TokenSharding:
    """How a rank divides steps with the others.

    ranks: how many; index: which of them this one is. piece: tokens of the shortest piece of a chunk that is cut; a
    chunk of less than 2 * ranks of them is of one rank. times: with their `division`; None where a device's are not
    known.
    """

    ranks: int
    index: int
    piece: int
    times: StepTimes | None = None

    @staticmethod
    def on(device: str, ranks: int, index: int, times: StepTimes | None = None) -> TokenSharding:
        """On a kind of device."""
        return TokenSharding(ranks, index, _PIECE_ON_CUDA if device == "cuda" else _PIECE_ON_CPU, times)

    def agreed(self, least: Callable[[int], int]) -> TokenSharding:
        """With the times of one rank: ranks may have different experts, and all have to divide the same steps. It is
        the one that expects the shortest step that is divided to take the longest, as the others wait for it. least:
        tells the others a number, and what is the least that any has told; see `Rank`."""
        if self.times is None:
            return self
        own, division, leads = self.times, self.times.division, True
        assert division is not None

        def of_one(number: int) -> int:
            """What the ranks tell that have told as the one did so far: the others' numbers do not count."""
            nonlocal leads
            found = least(number if leads else _MAX_TOLD)
            leads = leads and found == number
            return found

        def of(seconds: float) -> float:
            return of_one(round(seconds / _TOLD_SECONDS)) * _TOLD_SECONDS

        of(-own.total(self.min_tokens, own.chunk(0, self.min_tokens)))
        division = replace(division, message=of(division.message), token=of(division.token))
        captured, overlapped = of_one(own.captured), of_one(own.overlapped)
        own = replace(own, captured=captured, overlapped=overlapped, division=division)
        seconds = [one.name for one in fields(own) if one.name not in ("captured", "overlapped", "division")]
        found: dict[str, Any] = {name: of(getattr(own, name)) for name in seconds}
        return replace(self, times=replace(own, **found))

    @property
    def min_tokens(self) -> int:
        """Tokens of the shortest step that is divided: as many as of the shortest chunk that is cut."""
        return 2 * self.ranks * self.piece

    def share(self, step: PlanArrays) -> RankStep | None:
        """What this rank would run of a step; None of one of decodes alone or too few tokens, which none divide."""
        return None if step.are_decodes or step.tokens < self.min_tokens else self.shard(step)

    def pays(self, step: PlanArrays, share: RankStep, *, captured: bool) -> bool:
        """Whether a step is expected to take less time if ranks divide it so, the one with the most tokens last.
        captured: the shares are replayed, not launched kernel by kernel. Without times: if none has half as many tokens
        again as all have on average."""
        times, tokens = self.times, self.ranks * share.max_tokens
        if times is None or times.division is None:
            return tokens < _UNEVEN * step.tokens
        pairs = float((step.counts * (step.starts + (step.counts + 1) / 2)).sum())
        others = times.token * step.tokens + times.sequence * len(step.counts)
        others += times.key * float(step.ends.sum()) + times.pair * pairs
        division = replace(times.division, captured=tokens if captured else 0)
        of_most = others * tokens / step.tokens
        return division.total(times, tokens, of_most) < times.undivided(step.tokens, others + times.prompts)

    def largest(self, max_tokens: int, max_sequences: int) -> BufferShape:
        """No share of a step of so many tokens and sequences needs more."""
        rows = -(-max_tokens // self.ranks) + 2 * self.ranks * self.piece + _ROW_MULTIPLE
        return BufferShape(rows, 2 * max_sequences + 1, max_sequences, ranks=self.ranks)

    def shard(self, step: PlanArrays) -> RankStep:
        """What this rank runs of a step."""
        pieces = pieces_of(step.counts.tolist(), self.ranks, self.piece)
        tables = [np.array(own, dtype=np.int32).reshape(-1, 3).T for own in pieces]
        shares = [Share(step.slots[chunk], step.starts[chunk] + first, count) for chunk, first, count in tables]
        rank_of, row_of = np.zeros_like(step.counts), np.zeros_like(step.counts)  # of the last token of each chunk
        for rank, (chunk, first, count) in enumerate(tables):
            ends = first + count == step.counts[chunk]
            rank_of[chunk[ends]], row_of[chunk[ends]] = rank, np.cumsum(count)[ends] - 1
        drawn = np.searchsorted(step.last_rows, step.draw_rows)  # of which chunk each draw is
        rows = np.where(rank_of[drawn] == self.index, row_of[drawn], 0)
        return RankStep(step, shares, self.index, rows.astype(np.int32), rank_of[drawn])


class RankStep(PlanArrays):
    """A rank's share of a step, whose pieces of sequences stand for chunks; draws are those of the whole step.

    shares: of all ranks. max_tokens: of the largest. rows: of each rank, padding included. draw_rows: of each draw the
    row if it is this rank's, else any. draw_ranks: [draws] int32, whose it is.
    """

    def __init__(
        self, step: PlanArrays, shares: Sequence[Share], index: int, draw_rows: Int32Array, draw_ranks: Int32Array
    ) -> None:
        self.shares, self.draw_ranks = shares, draw_ranks
        self.slots, self.starts, self.counts = shares[index]
        self.ends = self.starts + self.counts
        self.last_rows = np.cumsum(self.counts, dtype=np.int32) - 1
        self.tokens = int(self.counts.sum())
        self.are_decodes = False
        self.drawn, self.draw_slots, self.draw_lengths = step.drawn, step.draw_slots, step.draw_lengths
        self.draw_rows = draw_rows
        self.max_tokens = max(int(share.counts.sum()) for share in shares)
        self.rows = rows_of(self.max_tokens)

    def place(self, buffer: StepBuffer, tables: BlockTables, page_size: int) -> None:
        """Write what all ranks have, beside the share itself: where their keys and values go, and their draws."""
        buffer.place_written(tables, page_size, self.shares)
        draws = len(self.draw_ranks)
        buffer.host["chosen"][:draws] = self.draw_ranks * buffer.shape.draws + np.arange(draws, dtype=np.int32)

    @property
    def shape(self) -> BufferShape:
        """What its buffer holds, with a sequence for padding if there is some."""
        padded = self.rows > self.tokens
        return BufferShape(self.rows, len(self.slots) + padded, len(self.drawn), ranks=len(self.shares))

    @property
    def max_sizes(self) -> tuple[int, int, int, int, int]:
        """The most tokens, sequences, draws, prompts and keys of prompts (in whole blocks) of any rank, by which all
        take a captured size."""
        sequences = max(len(share.slots) for share in self.shares)
        ends = [(share.starts + share.counts)[share.counts != 1].tolist() for share in self.shares]
        prompts, keys = max(map(len, ends)), max(map(keys_in_blocks, ends))
        return self.rows, sequences, len(self.drawn), prompts, keys


def rows_of(tokens: int) -> int:
    """Of a rank whose share has so many tokens."""
    return -(-tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE


def pieces_of(counts: Sequence[int], ranks: int, piece: int) -> list[list[Piece]]:
    """Of each rank the pieces of chunks with so many tokens, those of one token first.

    A chunk of at least 2 * ranks * piece tokens is cut into 2 * ranks pieces, of which rank r takes r and, from the
    back, r; shorter ones are dealt out whole, the longest first, to whoever has the fewest tokens.
    """
    found: list[list[Piece]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for chunk in sorted(range(len(counts)), key=lambda one: -counts[one]):
        for rank, first, end in _cut(counts[chunk], ranks, piece, tokens):
            found[rank].append(Piece(chunk, first, end - first))
            tokens[rank] += end - first
    return [sorted(own, key=lambda one: (one.count != 1, one)) for own in found]


def _cut(count: int, ranks: int, piece: int, tokens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Rank, first token and end of each piece of a chunk. tokens: of each rank so far."""
    parts = 2 * ranks
    if count < parts * piece:
        yield tokens.index(min(tokens)), 0, count
        return
    ends = [count * part // parts for part in range(parts + 1)]
    for rank in range(ranks - 1):
        back = parts - 1 - rank
        yield rank, ends[rank], ends[rank + 1]
        yield rank, ends[back], ends[back + 1]
    yield ranks - 1, ends[ranks - 1], ends[ranks + 1]  # both of the last rank are neighbours
