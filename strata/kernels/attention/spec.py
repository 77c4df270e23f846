"""What attention is given besides queries, keys and values: what a layer fixes, and the sequences of a step.

Tuples, because torch.fx takes them into a graph as they are, and sees the nodes in them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

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


class PackedBatch(Protocol):
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


class Sequences(NamedTuple):
    """A `PackedBatch` that is nothing more: a part of one."""

    offsets: Tensor
    longest: int
    pages: PagedKV | None = None
