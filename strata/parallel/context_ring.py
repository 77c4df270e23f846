"""Ring attention (Liu et al. 2023): keys and values travel around the ranks while each computes with those it has.

With chunks dealt out in a zigzag, what a rank sees of another's keys is one call over all packed documents.
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
from strata.kernels.attention.partial import VisibleKeys, partial_attention, partial_attention_gradients
from strata.parallel.ring_products import arriving_chunks
from strata.parallel.zigzag import Zigzag, ZigzagChunk

Rows = slice | Tensor


@dataclass(frozen=True)
class RingStep:
    """What a rank's queries see of the keys of one rank.

    queries, keys: which of the rank's own rows and of the other's take part, in order: a slice where they stand side by
    side, as all of them or those of one document do, which copies nothing; else [rows] int64.
    """

    part: VisibleKeys
    queries: Rows
    keys: Rows


class RingSteps:
    """The steps of one rank, by the rank that the keys are of; None where no key is seen.

    Of a document, a rank sees the early chunk of the ranks before it with all its queries, and of the ranks behind it
    both chunks with its late queries. Its own rows of a document stand in the document's order.
    """

    def __init__(self, division: Zigzag, rank: int, device: torch.device) -> None:
        self.tokens = division.tokens
        self._ring_steps = [_ring_step(division, rank, source, device) for source in range(division.ranks)]

    def __getitem__(self, source: int) -> RingStep | None:
        return self._ring_steps[source]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring_steps: RingSteps, axis: Axis, scale: float) -> Tensor:
    """Causal attention inside documents whose tokens the ranks share out, with the gradients of one process.

    q: [own tokens, heads, head_dim]; k, v: [own tokens, kv_heads, head_dim], rotated. Returns q's shape and dtype. What
    a step adds is rounded to it, and joined in float32 (float64 for float64).

    Each rank sends its keys and values ranks - 1 times forward; backward those again, with their gradients one step
    behind, which are back after the last shift.
    """
    return _Ring.apply(q, k, v, ring_steps, axis, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring_steps: RingSteps, axis: Axis, scale: float) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, dtype=wide)
        # The log of the sum of the exponentials of a query's scores so far, [own tokens, heads].
        sums = out.new_empty(out.shape[:2])
        for source, pair in circulate(k, v, max(ring_steps.tokens), axis):
            ring_step = ring_steps[source]
            if ring_step is None:
                continue
            mixed, total = partial_attention(q[ring_step.queries], *pair[:, ring_step.keys], ring_step.part, scale)
            if source == axis.index:  # the first, of all queries
                out.copy_(mixed)
                sums.copy_(total)
            else:
                _join(out, sums, ring_step.queries, mixed, total)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, sums)
        ctx.ring_steps, ctx.axis, ctx.scale = ring_steps, axis, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, sums = ctx.saved_tensors
        ring_steps, axis = ctx.ring_steps, ctx.axis
        own = grads[0].contiguous(), q, result, sums
        of_q = torch.empty_like(q, dtype=sums.dtype)
        ring_gradients = RingGradients(axis)
        for source, pair in circulate(k, v, max(ring_steps.tokens), axis):
            of_pair = torch.zeros_like(pair, dtype=sums.dtype)
            ring_step = ring_steps[source]
            if ring_step is not None:
                slope, queries, out, total = (one[ring_step.queries] for one in own)
                of_queries, *of_keys = partial_attention_gradients(
                    slope, queries, *pair[:, ring_step.keys], out, total, ring_step.part, ctx.scale
                )
                if source == axis.index:  # the first, of all queries
                    of_q.copy_(of_queries)
                else:
                    of_q[ring_step.queries] += of_queries
                for into, gradient in zip(of_pair, of_keys, strict=True):
                    into[ring_step.keys] += gradient
            ring_gradients.send(of_pair)
        of_k, of_v = ring_gradients.local()[:, : k.shape[0]].to(q.dtype)
        return of_q.to(q.dtype), of_k, of_v, None, None, None


def circulate(k: Tensor, v: Tensor, rows: int, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Each rank's number and its keys and values, [2, rows, kv_heads, head_dim], this one's first. The next ones arrive
    while the caller computes. rows: alike on all ranks; what a rank has fewer is zeros.
    """
    pair = torch.stack((k, v))
    if k.shape[0] < rows:
        pair = F.pad(pair, (0, 0, 0, 0, 0, rows - k.shape[0]))
    return arriving_chunks(pair, axis)


class RingGradients:
    """Gradients of the keys and values that `circulate` sends: one shift behind them, summed from rank to rank."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._on_the_way: Pending | None = None

    def send(self, gradients: Tensor) -> None:
        """Add what this rank has for the pair at hand, in place, and hand it on."""
        if self._on_the_way is not None:
            gradients += self._on_the_way.wait()
        self._on_the_way = start_shift(gradients, self._axis)

    def local(self) -> Tensor:
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


def _ring_step(division: Zigzag, rank: int, source: int, device: torch.device) -> RingStep | None:
    queries, keys = [], []
    for own, others in zip(division.chunks(rank), division.chunks(source), strict=True):
        seeing = [chunk for chunk in own if any(other.start <= chunk.start for other in others)]
        seen = [other for other in others if any(other.start <= chunk.start for chunk in own)]
        if seeing:
            queries.append(seeing)
            keys.append(seen)
    if not queries:
        return None
    q_counts, k_counts = ([sum(chunk.length for chunk in chunks) for chunks in each] for each in (queries, keys))
    part = VisibleKeys(
        _offsets(q_counts, device), _offsets(k_counts, device), max(q_counts), max(k_counts), rank == source
    )
    return RingStep(part, _rows(queries, device), _rows(keys, device))


def _offsets(counts: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device)


def _rows(documents: Sequence[Sequence[ZigzagChunk]], device: torch.device) -> Rows:
    chunks = [chunk for document in documents for chunk in document]
    first, end = chunks[0].row, chunks[-1].row + chunks[-1].length
    if end - first == sum(chunk.length for chunk in chunks):
        return slice(first, end)
    rows = [row for chunk in chunks for row in range(chunk.row, chunk.row + chunk.length)]
    return to_device(torch.tensor(rows, dtype=torch.int64), device)
