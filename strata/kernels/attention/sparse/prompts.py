"""Attention in which long prompts see the blocks of keys that hold most of a pooled softmax, and no others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse import prompts_cuda
from strata.kernels.attention.sparse.block_choice import BlockChoice, kept_blocks, pooled_scores
from strata.kernels.attention.spec import AttentionSpec, Sequences, SparseCall
from strata.kernels.op import operation
from strata.kernels.state.paged import PagedKV
from strata.kernels.triton_import import HAS_TRITON


def _cost(call: SparseCall[BlockChoice], *, workload: Workload) -> Cost:
    """That of all keys: how many are left out depends on what they are."""
    return attention.cost(*call.whole, workload=workload)


@operation(_cost, operands=SparseCall, reads_state=True)
def block_sparse_attention(call: SparseCall[BlockChoice]) -> Tensor:
    """As `attention` over pages, where queries of sequences with several new tokens and `choice.least_keys` or more in
    all see, of the keys at their positions and before, those in blocks that they keep: see `kept_blocks`.

    Blocks of queries begin with the first new token of a sequence in this step, so what they keep depends on where a
    prompt was cut; it does not on other sequences. spec: without a window. Without pages all keys are seen.
    """
    return _attend(call, attention.reference)


def _attend(call: SparseCall[BlockChoice], whole: Callable[..., Tensor]) -> Tensor:
    """whole: `attention`, for sequences that see all keys."""
    q, k, v, batch, spec, choice, sinks = call
    pages = batch.pages
    if pages is None:
        return whole(*call.whole)
    out = torch.empty_like(q)
    lengths = pages.lengths.tolist()
    for sequence, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        new, total = last - first, lengths[sequence]
        own, given = pages.sequences(sequence, sequence + 1), (q[first:last], k[first:last], v[first:last])
        if new == 1 or total < max(new, choice.least_keys):
            offsets = batch.offsets[sequence : sequence + 2] - first
            out[first:last] = whole(*given, Sequences(offsets, new, own), spec, sinks)
        else:
            out[first:last] = _prompt(*given, own, total, spec, choice, sinks)
    return out


def _prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: PagedKV,
    total: int,
    spec: AttentionSpec,
    choice: BlockChoice,
    sinks: Tensor | None,
) -> Tensor:
    """The queries of one sequence, over what is left of it: to each block of them it is a shorter sequence."""
    out, (new, heads, _), block = torch.empty_like(q), q.shape, choice.block
    per_block, group = block // pages.page_size, heads // k.shape[1]
    table = pages.tables[0, : -(-total // pages.page_size)].long()
    precision = torch.promote_types(q.dtype, torch.float32)
    keys = pages.rows(spec.layer, table, precision)[0].flatten(0, 1)[:total].to(precision)
    for kv_head in range(k.shape[1]):
        own, members = slice(kv_head, kv_head + 1), slice(kv_head * group, (kv_head + 1) * group)
        pools = [(pool[spec.layer][:, :, own],) for pool in (pages.keys, pages.values)]
        scores = pooled_scores(q[:, members].to(precision), keys[:, kv_head], choice, spec.scale)
        for first, blocks in zip(range(0, new, block), kept_blocks(scores, new, total, choice), strict=True):
            rows = slice(first, min(first + block, new))
            end, count = total - new + rows.stop, rows.stop - first
            used = blocks.repeat_interleave(per_block)[: -(-end // pages.page_size)]
            # The last block is always kept, and nothing in it from `end` on is seen.
            length = torch.tensor([int(blocks.sum()) * block - (-end % block)])
            seen = PagedKV(pools[0], pools[1], table[: len(used)][used][None], length, pages.slot_mapping)
            part = Sequences(torch.tensor([0, count]), count, seen)
            given = (q[rows, members], k[rows, own], v[rows, own], part, spec._replace(layer=0))
            out[rows, members] = attention.reference(*given, None if sinks is None else sinks[members])
    return out


@block_sparse_attention.implement("blocks", "cpu")
def _on_cpu(call: SparseCall[BlockChoice]) -> Tensor:
    return _attend(call, attention.bind("cpu"))


if HAS_TRITON:
    block_sparse_attention.implement("triton", "cuda", supports=prompts_cuda.supports, kernels=prompts_cuda.kernels)(
        prompts_cuda.attend
    )
