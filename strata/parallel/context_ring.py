"""Ring attention (Liu et al. 2023): keys and values travel around the ranks while each computes with those it has.

With pieces dealt out in a zigzag, what a rank sees of another's keys is one call over all packed documents.
"""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.comm.collectives import Pending, start_shift
from strata.comm.mesh import Axis
from strata.comm.to_device import to_device
from strata.kernels.attention.partial import Part, partial_attention, partial_attention_gradients
from strata.parallel.zigzag import Piece, Zigzag

Rows = slice | Tensor


@dataclass(frozen=True)
class Turn:
    """What a rank's queries see of the keys of one rank.

    queries, keys: which of the rank's own rows and of the other's take part, in order: a slice where they stand side by
    side, as all of them or those of one document do, which copies nothing; else [rows] int64.
    """

    part: Part
    queries: Rows
    keys: Rows


class Turns:
    """The turns of one rank, by the rank that the keys are of; None where no key is seen.

    Of a document, a rank sees the early piece of the ranks before it with all its queries, and of the ranks behind it
    both pieces with its late queries. Its own rows of a document stand in the document's order.
    """

    def __init__(self, division: Zigzag, rank: int, device: torch.device) -> None:
        self.tokens = division.tokens
        self._turns = [_turn(division, rank, source, device) for source in range(division.ranks)]

    def __getitem__(self, source: int) -> Turn | None:
        return self._turns[source]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, turns: Turns, axis: Axis, scale: float) -> Tensor:
    """Causal attention inside documents whose tokens the ranks share out, with the gradients of one process.

    q: [own tokens, heads, head_dim]; k, v: [own tokens, kv_heads, head_dim], rotated. Returns q's shape and dtype. What
    a turn adds is rounded to it, and joined in float32 (float64 for float64).

    Each rank sends its keys and values ranks - 1 times forward; backward those again, with their gradients one step
    behind, which arrive at home after a full turn.
    """
    return _Ring.apply(q, k, v, turns, axis, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, turns: Turns, axis: Axis, scale: float) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, dtype=wide)
        # The log of the sum of the exponentials of a query's scores so far, [own tokens, heads].
        sums = out.new_empty(out.shape[:2])
        for source, pair in around(k, v, max(turns.tokens), axis):
            turn = turns[source]
            if turn is None:
                continue
            mixed, total = partial_attention(q[turn.queries], *pair[:, turn.keys], turn.part, scale)
            if source == axis.index:  # the first, of all queries
                out.copy_(mixed)
                sums.copy_(total)
            else:
                _join(out, sums, turn.queries, mixed, total)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.turns, ctx.axis, ctx.scale = turns, axis, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, sums = ctx.saved_tensors
        turns, axis = ctx.turns, ctx.axis
        own = grads[0].contiguous(), q, result, sums
        of_q = torch.empty_like(q, dtype=sums.dtype)
        home = Homecoming(axis)
        for source, pair in around(k, v, max(turns.tokens), axis):
            of_pair = torch.zeros_like(pair, dtype=sums.dtype)
            turn = turns[source]
            if turn is not None:
                slope, queries, out, total = (one[turn.queries] for one in own)
                of_queries, *of_keys = partial_attention_gradients(
                    slope, queries, *pair[:, turn.keys], out, total, turn.part, ctx.scale
                )
                if source == axis.index:  # the first, of all queries
                    of_q.copy_(of_queries)
                else:
                    of_q[turn.queries] += of_queries
                for into, gradient in zip(of_pair, of_keys, strict=True):
                    into[turn.keys] += gradient
            home.send(of_pair)
        of_k, of_v = home.arrived()[:, : k.shape[0]].to(q.dtype)
        return of_q.to(q.dtype), of_k, of_v, None, None, None


def around(k: Tensor, v: Tensor, rows: int, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Each rank's number and its keys and values, [2, rows, kv_heads, head_dim], this one's first. The next ones arrive
    while the caller computes. rows: alike on all ranks; what a rank has fewer is zeros.
    """
    pair = torch.stack((k, v))
    if k.shape[0] < rows:
        pair = F.pad(pair, (0, 0, 0, 0, 0, rows - k.shape[0]))
    for step in range(axis.size):
        following = start_shift(pair, axis) if step + 1 < axis.size else None
        yield (axis.index - step) % axis.size, pair
        if following is not None:
            pair = following.wait()


class Homecoming:
    """Gradients that follow what goes `around`, one rank behind it, and grow on their way home."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._on_the_way: Pending | None = None

    def send(self, gradients: Tensor) -> None:
        """Add what this rank has for the pair at hand, in place, and hand it on."""
        if self._on_the_way is not None:
            gradients += self._on_the_way.wait()
        self._on_the_way = start_shift(gradients, self._axis)

    def arrived(self) -> Tensor:
        """The whole gradient of this rank's own pair, once all have been sent."""
        assert self._on_the_way is not None
        return self._on_the_way.wait()


def _join(out: Tensor, sums: Tensor, rows: Rows, part: Tensor, part_sums: Tensor) -> None:
    """Merge what some rows make of more keys, in place."""
    mixed, before = out[rows], sums[rows]
    after = torch.logaddexp(before, part_sums)
    old, new = (before - after).exp_()[..., None], (part_sums - after).exp()[..., None]
    # What a slice takes changes where it stands, and the assignment then has nothing to copy.
    out[rows] = mixed.mul_(old).addcmul_(part, new)
    sums[rows] = after


def _turn(division: Zigzag, rank: int, source: int, device: torch.device) -> Turn | None:
    queries, keys = [], []
    for own, others in zip(division.pieces(rank), division.pieces(source), strict=True):
        seeing = [piece for piece in own if any(other.start <= piece.start for other in others)]
        seen = [other for other in others if any(other.start <= piece.start for piece in own)]
        if seeing:
            queries.append(seeing)
            keys.append(seen)
    if not queries:
        return None
    q_counts, k_counts = ([sum(piece.length for piece in pieces) for pieces in each] for each in (queries, keys))
    part = Part(_offsets(q_counts, device), _offsets(k_counts, device), max(q_counts), max(k_counts), rank == source)
    return Turn(part, _rows(queries, device), _rows(keys, device))


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device)


def _rows(documents: Sequence[Sequence[Piece]], device: torch.device) -> Rows:
    pieces = [piece for document in documents for piece in document]
    first, end = pieces[0].row, pieces[-1].row + pieces[-1].length
    if end - first == sum(piece.length for piece in pieces):
        return slice(first, end)
    rows = [row for piece in pieces for row in range(piece.row, piece.row + piece.length)]
    return to_device(torch.tensor(rows, dtype=torch.int64), device)
