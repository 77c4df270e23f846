"""Sizes of latent attention, and its two forms: keys and values expanded, or the queries absorbed (DeepSeek-V2, 2024,
section 2.1.2 and appendix C)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.attention.spec import AttentionBatch, AttentionSpec, pages_of
from strata.kernels.state.dcp_shard import DcpShard
from strata.kernels.state.paged import PagedKV


class Dims(NamedTuple):
    """heads: of queries. nope, rope: of a query's dimensions those without a position and, behind them, those with one.
    rank: of the latent. value: of a head's result."""

    heads: int
    nope: int
    rope: int
    rank: int
    value: int

    @staticmethod
    def of(q: Tensor, row: Tensor, weight: Tensor) -> Dims:
        """q [tokens, heads, nope + rope], row [tokens, rank + rope], weight [heads * (nope + value), rank]."""
        heads, rank = q.shape[1], weight.shape[1]
        rope = row.shape[1] - rank
        nope = q.shape[2] - rope
        return Dims(heads, nope, rope, rank, weight.shape[0] // heads - nope)

    @property
    def product_flops(self) -> int:
        """To expand one row, or to absorb one token's queries and expand its result: the same weights."""
        return 2 * self.heads * self.rank * (self.nope + self.value)

    def expanded_flops(self, new: int, total: int) -> int:
        """Of a sequence of `total` tokens, the last `new` of which are queries, with keys and values of each head."""
        each = 2 * self.heads * (self.nope + self.rope + self.value)
        return total * self.product_flops + each * visible(new, total)

    def absorbed_flops(self, new: int, total: int) -> int:
        """The same with queries in the space of the latent, which is key and value of all heads at once."""
        return new * self.product_flops + 2 * self.heads * (2 * self.rank + self.rope) * visible(new, total)

    def absorbs(self, new: int, total: int) -> bool:
        """Whether that is the form with fewer FLOPs: of decodes, and of short pieces of prompts behind long ones."""
        return self.absorbed_flops(new, total) < self.expanded_flops(new, total)


class LatentCall(NamedTuple):
    """The operands of `latent_attention`.

    q: [tokens, heads, nope + rope]; row: [tokens, rank + rope] of `latent_write`; weight: [heads * (nope + value),
    rank], of each head what makes the keys and then what makes the values of a latent, the first `rank` columns of a
    row. The other columns are the end of the keys of all heads. One dtype.
    batch: without pages the rows are those given, and a sequence's first token has position 0. Otherwise they are
    `pages.keys[spec.layer]`, [pages, page_size, 1, rank + rope], where these were written before, and the last token of
    sequence s has position lengths[s] - 1. spec: without a window.
    """

    q: Tensor
    row: Tensor
    weight: Tensor
    batch: AttentionBatch
    spec: AttentionSpec

    @property
    def dims(self) -> Dims:
        return Dims.of(self.q, self.row, self.weight)

    @property
    def pages(self) -> PagedKV:
        return pages_of(self.batch)


class DcpLatentCall(NamedTuple):
    """The operands of `dcp_latent_attention`. q: [tokens, heads, rank + rope] of `absorb_queries`, the heads of all
    ranks that divide the rows; row: [tokens, rank + rope], of which the pages have what is kept here."""

    q: Tensor
    row: Tensor
    batch: AttentionBatch
    spec: AttentionSpec
    kept: DcpShard
    rank: int

    @property
    def pages(self) -> PagedKV:
        return pages_of(self.batch)


def visible(new: int, total: int) -> int:
    """Pairs of a query and a key that it sees: the last `new` positions, each of which sees itself and those before."""
    return new * total - new * (new - 1) // 2


def by_head(weight: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
    """What makes keys [heads, nope, rank] and values [heads, value, rank] of a latent: views of the weight."""
    keys, values = weight.view(dims.heads, -1, dims.rank).split_with_sizes((dims.nope, dims.value), 1)
    return keys, values


def expanded(row: Tensor, weight: Tensor, dims: Dims) -> tuple[Tensor, Tensor]:
    """Keys [tokens, heads, nope + rope] and values [tokens, heads, value] of rows [tokens, rank + rope]."""
    latent, key = row.split_with_sizes((dims.rank, dims.rope), -1)
    made = F.linear(latent, weight).unflatten(-1, (dims.heads, -1))
    nope, values = made.split_with_sizes((dims.nope, dims.value), -1)
    shared = key[:, None].expand(-1, dims.heads, -1)
    return torch.cat((nope, shared), -1), values


def alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same attention with heads of one size, as its kernels have them: zeros behind the shorter of queries and
    values. Results are the first columns, as many as `v` had."""
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v
