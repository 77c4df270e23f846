"""Attention in which long prompts see the blocks of keys that hold most of a pooled softmax, and no others.

Block-sparse attention on CUDA: sequences with one new token split their keys, prompts see the blocks that they keep.

Grids follow from shapes alone; what is kept never leaves the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.attention import attention
from strata.kernels.attention.cuda import SeenBlocks
from strata.kernels.attention.sparse.block_choice import BlockChoice, chosen_blocks, pooled_scores
from strata.kernels.attention.sparse.by_sequence import by_sequence, over_chosen
from strata.kernels.attention.sparse.choice_triton import (
    choice_warps,
    chosen_blocks_kernel,
    pooled_scores_kernel,
    pooled_tile,
)
from strata.kernels.attention.spec import AttentionBatch, AttentionSpec, SparseCall, pages_of
from strata.kernels.attention.varlen_triton import LOG2_E, attention_kernel, head_pad
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.state.paged import PagedKV

# Blocks that a program chooses among at least, so that one variant of the kernel serves all shorter sequences.
_MIN_PADDED = 1024


def supports(call: SparseCall[BlockChoice]) -> bool:
    pages = call.batch.pages
    return (
        pages is not None
        and not pages.is_quantized
        and call.spec.window is None
        and attention_cuda.supports(call.whole)
        and attention_cuda.fits_decode(call.whole)
    )


def kernels(call: SparseCall[BlockChoice]) -> tuple[Any, ...]:
    prompts = (pooled_scores_kernel, chosen_blocks_kernel, attention_kernel)
    return (*attention_cuda.decode_kernels(call.whole, _decodes(pages_of(call.batch))), *prompts)


def _decodes(pages: PagedKV) -> int:
    """How many sequences, the first of the batch, are known to have one new token."""
    return 0 if pages.parts is None else pages.parts.decodes or 0


def scratch_bytes(tokens: int, max_keys: int, heads: int, kv_heads: int, choice: BlockChoice) -> int:
    """What choosing needs in a step of so many tokens, of sequences of at most so many keys."""
    blocks = ceil_div(max_keys, choice.block)
    return 4 * blocks * (tokens // choice.stride * heads + tokens // choice.block * kv_heads)


def attend(call: SparseCall[BlockChoice]) -> Tensor:
    q, k, v, batch, spec, choice, sinks = call
    pages = pages_of(batch)
    parts, count, starts = pages.parts, _decodes(pages), batch.offsets
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if parts is not None and parts.decodes is not None:
        starts = parts.starts
    if parts is not None and count:
        rows = slice(0, count)
        decodes = replace(pages, tables=pages.tables[rows], lengths=parts.decode_lengths[rows])
        queries, heads, head_dim = q[rows].flatten(1), q.shape[1], q.shape[2]
        decode_attention_cuda.decode(queries, heads, head_dim, decodes, spec, out=out[rows], sinks=sinks)
    if len(q) > count:
        blocks = SeenBlocks(*choose(q, k.shape[1], starts, batch, spec, choice), choice.block)
        attention_cuda.prefill(out, q, k, v, starts, batch, spec, sinks=sinks, blocks=blocks)
    return out


def choose(
    q: Tensor, kv_heads: int, starts: Tensor, batch: AttentionBatch, spec: AttentionSpec, choice: BlockChoice
) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries keeps: kept [kv_heads, blocks of queries, blocks], counts [kv_heads,
    blocks of queries] int32, as `chosen_blocks_kernel` says. starts: [sequences] int32, from which row on each
    sequence's queries are run."""
    pages = pages_of(batch)
    (tokens, heads, head_dim), sequences = q.shape, batch.offsets.shape[0] - 1
    group, block, stride = heads // kv_heads, choice.block, choice.stride
    blocks = ceil_div(pages.tables.shape[1] * pages.page_size, block)
    rows, lists = tokens // stride + sequences, tokens // block + sequences
    logs = torch.empty((kv_heads, rows, group, blocks), dtype=torch.float32, device=q.device)
    tile = pooled_tile(head_dim, q.dtype)
    queries = tile.rows // group * stride
    grid = (ceil_div(blocks * block // stride, tile.keys), kv_heads, tokens // queries + sequences)
    pooled_scores_kernel[grid](
        *(q, pages.keys[spec.layer], logs, starts, batch.offsets, pages.lengths, pages.tables),
        *(sequences, spec.scale * LOG2_E / stride, q.stride(0), pages.tables.stride(0)),
        *(rows, blocks, choice.min_keys),
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad(head_dim),
        PAGE_SIZE=pages.page_size,
        STRIDE=stride,
        BLOCK=block,
        ROWS=tile.rows,
        COLUMNS=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    padded = max(_MIN_PADDED, next_power_of_2(blocks))
    kept = torch.empty((kv_heads, lists, blocks), dtype=torch.int32, device=q.device)
    counts = torch.zeros((kv_heads, lists), dtype=torch.int32, device=q.device)
    chosen_blocks_kernel[(lists, kv_heads)](
        *(logs, kept, counts, starts, batch.offsets, pages.lengths),
        *(sequences, rows, blocks, choice.share, choice.min_keys),
        GROUP=group,
        STRIDE=stride,
        BLOCK=block,
        LOCAL=choice.local,
        BLOCKS=padded,
        num_warps=choice_warps(padded),
    )
    return kept, counts


def _cost(call: SparseCall[BlockChoice], *, workload: Workload) -> Cost:
    """That of all keys: how many are left out depends on what they are."""
    return attention.cost(*call.whole, workload=workload)


@operation(_cost, operands=SparseCall, reads_state=True)
def block_sparse_attention(call: SparseCall[BlockChoice]) -> Tensor:
    """As `attention` over pages, where queries of sequences with several new tokens and `choice.min_keys` or more in
    all see, of the keys at their positions and before, those in blocks that they keep: see `chosen_blocks`.

    Blocks of queries begin with the first new token of a sequence in this step, so what they keep depends on where a
    prompt was cut; it does not on other sequences. spec: without a window. Without pages all keys are seen.
    """
    return by_sequence(call, attention.reference, _prompt)


def _prompt(call: SparseCall[BlockChoice], total: int) -> Tensor | None:
    """The queries of one sequence, over what is left of it: to each block of them it is a shorter sequence."""
    q, k, pages, spec, choice = call.q, call.k, pages_of(call.batch), call.spec, call.choice
    new, block, per_block, group = len(q), choice.block, choice.block // pages.page_size, q.shape[1] // k.shape[1]
    if new == 1 or total < max(new, choice.min_keys):
        return None
    out, table = torch.empty_like(q), pages.tables[0, : -(-total // pages.page_size)].long()
    precision = torch.promote_types(q.dtype, torch.float32)
    keys = pages.rows(spec.layer, table, precision)[0].flatten(0, 1)[:total].to(precision)
    for kv_head in range(k.shape[1]):
        members = slice(kv_head * group, (kv_head + 1) * group)
        scores = pooled_scores(q[:, members].to(precision), keys[:, kv_head], choice, spec.scale)
        for first, blocks in zip(range(0, new, block), chosen_blocks(scores, new, total, choice), strict=True):
            rows = slice(first, min(first + block, new))
            end = total - new + rows.stop
            used = blocks.repeat_interleave(per_block)[: -(-end // pages.page_size)]
            # The last block is always kept, and nothing in it from `end` on is seen.
            length = int(blocks.sum()) * block - (-end % block)
            out[rows, members] = over_chosen(call, kv_head, rows, table[: len(used)][used], length)
    return out


block_sparse_attention.implement("blocks", "cpu")(partial(by_sequence, whole=attention.bind("cpu"), sparse=_prompt))
block_sparse_attention.in_triton(attend, supports=supports, kernels=kernels)
