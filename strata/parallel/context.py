"""Context parallelism: the ranks of an axis divide the tokens of every document, and attention brings them together.

A document of n tokens is cut into 2 * ranks chunks, and rank r takes chunks r and 2 * ranks - 1 - r ("zigzag"), so that
all ranks have about as many pairs of queries and keys although late tokens see more keys than early ones.
"""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MethodType
from typing import Literal

import torch
from torch import Tensor, nn

from strata.comm.collectives import all_to_all
from strata.comm.mesh import Axis
from strata.comm.to_device import to_device
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionBatch, AttentionSpec
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.layers import Attention
from strata.parallel.context_ring import RingSteps, ring_attention
from strata.parallel.context_ring_window import ring_window_attention
from strata.parallel.zigzag import Zigzag

Method = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class ContextBatch(Batch):
    """A rank's tokens of a packed batch: of every document, in order, the two chunks that are its own.

    positions are those in the whole document; offsets and longest count this rank's tokens (of some documents none).
    whole: the batch that is shared out. rows: [own tokens] int64, where each of them stands in the whole batch: index
    targets by it. division, axis: how the tokens are shared out. ring_steps: of the ring, exchange: of
    Ulysses; the other is None.
    """

    whole: Batch | None = None
    rows: Tensor | None = None
    division: Zigzag | None = None
    axis: Axis | None = None
    ring_steps: RingSteps | None = None
    exchange: _HeadExchange | None = None


def divide_batch(batch: Batch, lengths: Sequence[int], axis: Axis, method: Method) -> Batch:
    """This rank's part of a batch that all ranks along `axis` have alike; the batch itself if the axis has one rank.

    lengths: tokens of each document, on the host. method: "ring" sends keys and values around (Liu et al. 2023) and
    takes any number of heads; "ulysses" exchanges heads for tokens (Jacobs et al. 2023) and runs the attention of one
    device, for which `check_heads` must pass. Raises ValueError for a batch with pages.
    """
    if axis.group is None:
        return batch
    if batch.pages is not None:
        raise ValueError("a batch with a KV cache cannot be divided along cp; context parallelism is for training")
    division = Zigzag(tuple(lengths), axis.size)
    device = batch.tokens.device
    rows = to_device(torch.tensor(division.rows(axis.index), dtype=torch.int64), device)
    counts = division.counts(axis.index)
    offsets = to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device)
    return ContextBatch(
        batch.tokens[rows],
        batch.positions[rows],
        offsets,
        max(counts, default=0),
        whole=batch,
        rows=rows,
        division=division,
        axis=axis,
        ring_steps=RingSteps(division, axis.index, device) if method == "ring" else None,
        exchange=_HeadExchange(division, axis, device) if method == "ulysses" else None,
    )


def check_heads(config: ModelConfig, cp: int, tp: int, method: Method) -> None:
    """Raise ValueError if Ulysses cannot share out the heads that tensor parallelism leaves on a rank, or if attention
    has sinks."""
    if cp > 1 and config.has_sinks:
        raise ValueError(f"cp = {cp} is not there for attention with sinks, as {config.architecture} has; leave cp out")
    if method == "ring":
        return
    heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        raise ValueError(
            f"cp = {cp} with ulysses shares out {heads} query heads and {kv_heads} key/value heads of a rank; "
            f"choose a cp that divides both (or a multiple of the latter), or method 'ring'"
        )


def parallelize_attention(model: nn.Module) -> None:
    """Let `model`, in place, take a `ContextBatch`; with any other batch it computes what it did before."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: Attention, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
    """`Attention.forward`, across ranks where the batch says so."""
    if not isinstance(batch, ContextBatch):
        return Attention.forward(self, x, batch, cos, sin)
    assert batch.division is not None
    assert batch.axis is not None
    assert batch.whole is not None
    q, k, v = self.heads(x)
    q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
    scale, window = self.spec.scale, self.spec.window
    if batch.ring_steps is not None and (window is None or window >= batch.whole.longest):
        mixed = ring_attention(q, k, v, batch.ring_steps, batch.axis, scale)
    elif batch.exchange is None:
        assert window is not None
        mixed = ring_window_attention(q, k, v, batch.division, batch.axis, scale, window)
    else:
        mixed = _ulysses_attention(q, k, v, batch.exchange, batch.whole, self.spec)
    return self.o_proj(mixed.flatten(-2))


class _HeadExchange:
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


def _ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, exchange: _HeadExchange, whole: AttentionBatch, spec: AttentionSpec
) -> Tensor:
    """Causal attention inside documents whose tokens the ranks share out, after Ulysses (Jacobs et al. 2023): shares of
    the tokens are exchanged for shares of the heads, and back.

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
