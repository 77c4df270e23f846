"""Ring attention with a window: blocks of queries and keys, of which those that see nothing are left out."""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.comm.mesh import Axis
from strata.parallel.context_ring import RingGradients, circulate
from strata.parallel.zigzag import Block, Zigzag


def ring_window_attention(
    q: Tensor, k: Tensor, v: Tensor, division: Zigzag, axis: Axis, scale: float, window: int
) -> Tensor:
    """As `strata.parallel.context_ring.ring_attention`, of queries that see `window` positions, their own included.

    The tokens are those of `division.rows(axis.index)`. Products are plain ones in float32 (float64 for float64), and a
    block of scores exists at a time.
    """
    return _WindowRing.apply(q, k, v, division, axis, scale, window)


class _WindowRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, division: Zigzag, axis: Axis, scale: float, window: int
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = _grouped(q, k.shape[1]).to(wide)
        out = torch.zeros_like(queries)
        # The log of the sum of the exponentials of a query's scores so far, [tokens, kv_heads, group].
        normalizer = queries.new_full(queries.shape[:-1], -torch.inf)
        for source, pair in circulate(k, v, max(division.tokens), axis):
            keys, values = pair.to(wide)
            for block in division.blocks(axis.index, source, window):
                _add_block(queries, keys, values, out, normalizer, block, scale, window)
        result = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, result, normalizer)
        ctx.division, ctx.axis, ctx.scale, ctx.window = division, axis, scale, window
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, result, normalizer = ctx.saved_tensors
        axis: Axis = ctx.axis
        wide = normalizer.dtype
        queries, slope = (_grouped(x, k.shape[1]).to(wide) for x in (q, grads[0]))
        # What the softmax takes off the gradient of each score of a query.
        common = (slope * _grouped(result, k.shape[1])).sum(-1)
        of_queries = torch.zeros_like(queries)
        ring_gradients = RingGradients(axis)
        for source, arrived in circulate(k, v, max(ctx.division.tokens), axis):
            pair = arrived.to(wide)
            of_pair = torch.zeros_like(pair)
            for block in ctx.division.blocks(axis.index, source, ctx.window):
                rows = block.queries
                weights = _scores(queries, pair[0], block, ctx.scale, ctx.window)
                weights = (weights - _rows_last(normalizer[rows])).exp_()
                of_pair[1, block.keys] += torch.einsum("hgqk,qhgd->khd", weights, slope[rows])
                of_weights = torch.einsum("qhgd,khd->hgqk", slope[rows], pair[1, block.keys])
                of_scores = weights * (of_weights - _rows_last(common[rows])) * ctx.scale
                of_queries[rows] += torch.einsum("hgqk,khd->qhgd", of_scores, pair[0, block.keys])
                of_pair[0, block.keys] += torch.einsum("hgqk,qhgd->khd", of_scores, queries[rows])
            ring_gradients.send(of_pair)
        of_keys, of_values = ring_gradients.local()[:, : k.shape[0]].to(q.dtype)
        return of_queries.flatten(1, 2).to(q.dtype), of_keys, of_values, None, None, None, None


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[tokens, heads, head_dim] -> [tokens, kv_heads, group, head_dim]."""
    return x.unflatten(1, (kv_heads, -1))


def _rows_last(x: Tensor) -> Tensor:
    """[queries, kv_heads, group] -> [kv_heads, group, queries, 1], to go with scores."""
    return x.permute(1, 2, 0)[..., None]


def _scores(queries: Tensor, keys: Tensor, block: Block, scale: float, window: int) -> Tensor:
    """[kv_heads, group, queries of the block, keys of the block], -inf where a key is hidden."""
    scores = torch.einsum("qhgd,khd->hgqk", queries[block.queries], keys[block.keys]) * scale
    if not block.masked:
        return scores
    at = torch.arange(scores.shape[2], device=scores.device)[:, None] + block.offset
    distance = at - torch.arange(scores.shape[3], device=scores.device)
    return scores.masked_fill_((distance < 0) | (distance >= window), -torch.inf)


def _add_block(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    normalizer: Tensor,
    block: Block,
    scale: float,
    window: int,
) -> None:
    """Merge the values of a block into `out` and `normalizer`, in place."""
    rows = block.queries
    scores = _scores(queries, keys, block, scale, window)
    before = normalizer[rows]
    # Never -inf: a query's first block holds its own key.
    after = torch.logaddexp(before, scores.logsumexp(-1).permute(2, 0, 1))
    weights = (scores - _rows_last(after)).exp_()
    out[rows] *= (before - after).exp_()[..., None]
    out[rows] += torch.einsum("hgqk,khd->qhgd", weights, values[block.keys])
    normalizer[rows] = after
