"""Ulysses (Jacobs et al. 2023): ranks exchange their shares of the tokens for shares of the heads, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.comm.collectives import all_to_all
from strata.comm.mesh import Axis
from strata.comm.to_device import to_device
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionSpec, PackedBatch
from strata.parallel.zigzag import Zigzag


class HeadExchange:
    """Own tokens with all heads become all tokens, in the order of the packed batch, with own heads; and back."""

    def __init__(self, division: Zigzag, axis: Axis, device: torch.device) -> None:
        self.axis, self._tokens = axis, division.tokens
        # Where in the batch each row stands when the ranks' rows lie one after another; and the inverse.
        order = torch.tensor([row for rank in range(axis.size) for row in division.rows(rank)], dtype=torch.int64)
        self._order, self._place = to_device(order, device), to_device(order.argsort(), device)

    def to_heads(self, x: Tensor) -> Tensor:
        """[own tokens, heads, head_dim] -> [all tokens, heads / ranks, head_dim]."""
        ranks, own = self.axis.size, x.shape[0]
        by_rank = x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        rows = all_to_all(by_rank, self.axis, [own] * ranks, self._tokens)
        return rows.index_select(0, self._place)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[all tokens, heads / ranks, head_dim] -> [own tokens, heads, head_dim]."""
        ranks, own = self.axis.size, self._tokens[self.axis.index]
        rows = x.index_select(0, self._order)
        by_rank = all_to_all(rows, self.axis, self._tokens, [own] * ranks)
        return by_rank.view(ranks, own, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, exchange: HeadExchange, whole: PackedBatch, spec: AttentionSpec
) -> Tensor:
    """Causal attention inside documents whose tokens the ranks share out.

    q: [own tokens, heads, head_dim]; k, v: [own tokens, kv_heads, head_dim], rotated. The ranks divide heads; they
    divide kv_heads, or are a multiple of them, and then a key head goes to several ranks. whole: the batch that
    is shared out, without pages. Returns q's shape.
    """
    ranks = exchange.axis.size
    if k.shape[1] % ranks:
        k, v = (x.repeat_interleave(ranks // k.shape[1], dim=1) for x in (k, v))
    q, k, v = (exchange.to_heads(x) for x in (q, k, v))
    mixed: Tensor = attention(q, k, v, whole, spec)
    return exchange.to_tokens(mixed)
