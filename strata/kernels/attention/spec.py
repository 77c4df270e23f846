"""What attention is given besides queries, keys and values: what a layer fixes, and the sequences of a step.

Tuples, because torch.fx takes them into a graph as they are, and sees the nodes in them.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from strata.kernels.state.dcp_shard import DcpShard
from strata.kernels.state.paged import PagedKV


class AttentionSpec(NamedTuple):
    """What is the same in every call of one layer's attention.

    layer: whose pools of the pages hold its keys and values. scale: multiplies the scores. window: None, or how many
    positions a query sees, its own included.
    """

    layer: int
    scale: float
    window: int | None = None


class HeadsSpec(NamedTuple):
    """What is the same in every call that makes the queries and keys of one layer out of its product.

    layer: whose pools the keys and values are written into. heads, kv_heads: how many stand side by side in the
    product. eps: of the norm of each head, if there is one.
    """

    layer: int
    heads: int
    kv_heads: int
    eps: float = 0.0


class AttentionBatch(Protocol):
    """The sequences of a step, as a `Batch` has them.

    offsets: [sequences + 1] int32, where each one's tokens begin. longest: the most tokens of one. pages: where earlier
    tokens and these have their keys and values; None when every sequence stands whole in the batch.
    """

    @property
    def offsets(self) -> Tensor: ...

    @property
    def longest(self) -> int: ...

    @property
    def pages(self) -> PagedKV | None: ...


def pages_of(batch: AttentionBatch) -> PagedKV:
    """Those of a batch that has some."""
    assert batch.pages is not None
    return batch.pages


class AttentionCall(NamedTuple):
    """The operands of `attention`.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim] of the same dtype, kv_heads dividing heads; query
    head h reads KV head h // (heads // kv_heads).
    batch: without pages the keys are k and v, and a sequence's first token has position 0. Otherwise the keys are those
    in the pools of `spec.layer`, where k and v were written before, and the last token of sequence s has position
    lengths[s] - 1.
    sinks: [heads], for each head a score that takes part in the softmax of every query, with no value behind it; it is
    not multiplied by `spec.scale`. None: there are none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch
    spec: AttentionSpec
    sinks: Tensor | None = None


class DcpCall(NamedTuple):
    """The operands of `dcp_attention`.

    q: [tokens, heads, head_dim], the heads of all ranks that divide these keys; k, v: [tokens, kv_heads, head_dim], of
    which the pages have what is kept here.
    batch: in pages, which hold the kept tokens of a sequence one after another; `pages.lengths` are those of whole
    sequences, the last token of sequence s at position lengths[s] - 1. spec: without a window.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch
    spec: AttentionSpec
    kept: DcpShard


Choice = TypeVar("Choice")


class SparseCall(NamedTuple, Generic[Choice]):
    """The operands of attention to chosen keys: those of `attention` over pages without a window, and which keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch
    spec: AttentionSpec
    choice: Choice
    sinks: Tensor | None = None

    @property
    def whole(self) -> AttentionCall:
        """The call of `attention` to all keys."""
        return AttentionCall(*self[:5], self.sinks)


class Sequences(NamedTuple):
    """An `AttentionBatch` that is nothing more: a part of one."""

    offsets: Tensor
    longest: int
    pages: PagedKV | None = None


# What operations that the kernels over pages run are called with: the first five of six operands are the same.
AttentionOperands = AttentionCall | DcpCall
