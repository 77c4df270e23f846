"""Block-sparse attention on CUDA: sequences with one new token split their keys, prompts see the blocks that they keep.

Grids follow from shapes alone; what is kept never leaves the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.cuda import SeenBlocks
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.choice_triton import (
    choice_warps,
    kept_blocks_kernel,
    pooled_scores_kernel,
    pooled_tile,
)
from strata.kernels.attention.spec import AttentionSpec, PackedBatch, SparseCall, pages_of
from strata.kernels.attention.varlen_triton import LOG2_E, attention_kernel, head_pad
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.state.paged import PagedKV

# Blocks that a program chooses among at least, so that one variant of the kernel serves all shorter sequences.
_LEAST_PADDED = 1024


def supports(call: SparseCall[BlockChoice]) -> bool:
    pages = call.batch.pages
    return (
        pages is not None
        and not pages.is_rounded
        and call.spec.window is None
        and attention_cuda.supports(call.whole)
        and attention_cuda.fits_decode(call.whole)
    )


def kernels(call: SparseCall[BlockChoice]) -> tuple[Any, ...]:
    prompts = (pooled_scores_kernel, kept_blocks_kernel, attention_kernel)
    return (*attention_cuda.decode_kernels(call.whole, _decodes(pages_of(call.batch))), *prompts)


def _decodes(pages: PagedKV) -> int:
    """How many sequences, the first of the batch, are known to have one new token."""
    return 0 if pages.parts is None else pages.parts.decodes or 0


def scratch_bytes(tokens: int, most_keys: int, heads: int, kv_heads: int, choice: BlockChoice) -> int:
    """What choosing needs in a step of so many tokens, of sequences of at most so many keys."""
    blocks = ceil_div(most_keys, choice.block)
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
    q: Tensor, kv_heads: int, starts: Tensor, batch: PackedBatch, spec: AttentionSpec, choice: BlockChoice
) -> tuple[Tensor, Tensor]:
    """Which blocks of keys each block of queries keeps: kept [kv_heads, blocks of queries, blocks], counts [kv_heads,
    blocks of queries] int32, as `kept_blocks_kernel` says. starts: [sequences] int32, from which row on each sequence's
    queries are run."""
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
        *(rows, blocks, choice.least_keys),
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
    padded = max(_LEAST_PADDED, next_power_of_2(blocks))
    kept = torch.empty((kv_heads, lists, blocks), dtype=torch.int32, device=q.device)
    counts = torch.zeros((kv_heads, lists), dtype=torch.int32, device=q.device)
    kept_blocks_kernel[(lists, kv_heads)](
        *(logs, kept, counts, starts, batch.offsets, pages.lengths),
        *(sequences, rows, blocks, choice.share, choice.least_keys),
        GROUP=group,
        STRIDE=stride,
        BLOCK=block,
        LOCAL=choice.local,
        BLOCKS=padded,
        num_warps=choice_warps(padded),
    )
    return kept, counts
