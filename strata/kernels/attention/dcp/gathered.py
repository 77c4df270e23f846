"""Attention to keys that ranks keep apart and have gathered: what each sends, and what attends to what all have sent.

For prompts, whose queries are more bytes than the keys that they see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionBatch, AttentionSpec, Sequences, pages_of
from strata.kernels.op import ATEN, Operation, operation
from strata.kernels.state.dcp_shard import DcpShard
from strata.kernels.state.paged import PagedKV


def _rows_meta(k: Tensor, batch: AttentionBatch, spec: AttentionSpec, kept: DcpShard, tensors: int) -> Tensor:
    pool = pages_of(batch).keys[spec.layer]
    return pool.new_empty((pages_of(batch).tables.numel(), tensors, *pool.shape[1:]), device="meta")


def _rows_cost(
    k: Tensor, batch: AttentionBatch, spec: AttentionSpec, kept: DcpShard, tensors: int, *, workload: Workload
) -> Cost:
    moved = _rows_meta(k, batch, spec, kept, tensors).nbytes
    return Cost(read=moved, written=moved)


@operation(_rows_cost, meta=_rows_meta)
def dcp_rows(k: Tensor, batch: AttentionBatch, spec: AttentionSpec, kept: DcpShard, tensors: int) -> Tensor:
    """The rows that this rank keeps of a step's sequences: [sequences * page_limit, tensors, page_size, kv_heads,
    head_dim], page after page of the block tables; past a sequence's pages some other page.

    k: what the pages have been written with before. tensors: 2 for keys and values, 1 if a row is both.
    """
    pages = pages_of(batch)
    counts = -(-pages.lengths // (pages.page_size * kept.ranks))
    is_used = torch.arange(pages.tables.shape[1], device=k.device) < counts[:, None]
    used = pages.tables.masked_fill(~is_used, 0).flatten().long()
    pools = (pages.keys[spec.layer], pages.values[spec.layer])[:tensors]
    return torch.stack([pool.index_select(0, used) for pool in pools], 1)


dcp_rows.by_definition("cpu", "cuda", invariant=True)


def whole_pages(batch: AttentionBatch, gathered: Tensor, kept: DcpShard) -> Sequences:
    """A step whose pages hold all tokens of its sequences, in pools of one layer. gathered: of `dcp_rows`, one rank's
    after another's."""
    pages = pages_of(batch)
    parts = gathered.unflatten(0, (kept.ranks, -1))
    # Position j * ranks + rank of a page is the j-th row of that rank.
    pools = [parts[:, :, at].permute(1, 2, 0, 3, 4).contiguous().flatten(1, 2) for at in range(parts.shape[2])]
    tables = torch.arange(pages.tables.numel(), dtype=torch.int32, device=pages.tables.device).view(pages.tables.shape)
    whole = PagedKV((pools[0],), (pools[-1],), tables, pages.lengths, pages.slot_mapping, parts=pages.parts)
    return Sequences(batch.offsets, batch.longest, whole)


class GatheredCall(NamedTuple):
    """The operands of attention to gathered keys: those of `attention`, or of `latent_attention` in the place of whose
    row and weight k and v stand here. gathered: [ranks * pages, tensors, page_size, kv_heads, head_dim], `dcp_rows` of
    each rank; `pages.lengths` are those of whole sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: AttentionBatch
    spec: AttentionSpec
    gathered: Tensor
    kept: DcpShard

    @property
    def whole(self) -> tuple[Any, ...]:
        """The operands of attention over pages of all tokens, of one layer."""
        return *self[:3], whole_pages(self.batch, self.gathered, self.kept), self.spec._replace(layer=0)


def over_gathered(attend: Operation) -> Operation:
    """The operation `gathered_...`: an attention to the keys, or rows, of all ranks."""

    def cost(call: GatheredCall, *, workload: Workload) -> Cost:
        copied = call.gathered.nbytes
        own: Cost = attend.cost(*call[:5], workload=workload)
        return own + Cost(read=copied, written=copied)

    def reference(call: GatheredCall) -> Any:
        return attend.reference(*call.whole)

    def kernels(call: GatheredCall) -> tuple[Any, ...]:
        return (ATEN, *attend.bind("cuda").launches(*call.whole))

    def scratch(call: GatheredCall) -> int:
        """The whole pages, and what attention to them needs."""
        return call.gathered.nbytes + attend.bind("cuda").scratch(*call.whole)

    def on(device: str) -> Callable[[GatheredCall], Any]:
        bound = attend.bind(device)
        return lambda call: bound(*call.whole)

    reference.__name__ = f"gathered_{attend.name}"
    reference.__doc__ = f"`{attend.name}` to the keys of all ranks."
    made = operation(cost, operands=GatheredCall, meta=lambda call: attend.meta(*call[:5]), reads_state=True)(reference)
    made.implement("composed", "cpu")(on("cpu"))
    made.implement("composed", "cuda", kernels=kernels, scratch=scratch)(on("cuda"))
    return made


gathered_attention = over_gathered(attention)
