"""Attention on CUDA: which Triton kernel runs a batch, and with what grid.

Grids follow from shapes alone, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.softmax_triton import SEGMENT_KEYS, SEGMENTS
from strata.kernels.attention.spec import AttentionBatch, AttentionCall, AttentionOperands, AttentionSpec, pages_of
from strata.kernels.attention.varlen_triton import LOG2_E, attention_kernel, head_pad, invariant_tile, mixed_tile
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.state.dcp_shard import ALL_KEYS, DcpShard


def supports(call: AttentionOperands) -> bool:
    q, k, v, batch, spec = call[:5]
    head_dim, pages = q.shape[2], batch.pages
    if pages is None:
        sources = (q, k, v)
    else:
        sources = (q, pages.keys[spec.layer], pages.values[spec.layer])
        if not (sources[1].is_contiguous() and sources[2].is_contiguous()):
            return False
    return (
        q.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and head_dim <= 256
        and q.shape[1] // k.shape[1] <= decode_attention_cuda.MAX_GROUP
        and all(x.stride(-1) == 1 and x.stride(-2) == head_dim for x in sources)
        and (q.dtype == k.dtype == v.dtype if pages is None else pages.holds(spec.layer, q.dtype))
    )


def fits_decode(call: AttentionOperands) -> bool:
    """Whether the kernel of decodes takes rows of such a step."""
    pages = call.batch.pages
    return pages is not None and decode_attention_cuda.fits(pages, call.q.shape[1], call.k.shape[1], call.q.shape[2])


def all_decode(call: AttentionOperands) -> bool:
    q, k, _, batch = call[:4]
    pages = batch.pages
    return (
        pages is not None
        and batch.longest == 1
        and q.shape[0] == pages.tables.shape[0]  # none goes without a token
        and decode_attention_cuda.fits(pages, q.shape[1], k.shape[1], q.shape[2])
    )


def decode_kernels(call: AttentionOperands, decodes: int, chosen: int | None = None) -> tuple[Any, ...]:
    """What the first sequences of a step launch, over so many chosen pages of each or all."""
    sizes = call.q.shape[1], call.q.shape[2], call.k.shape[1]
    return decode_attention_cuda.kernels(call.q, *sizes, pages_of(call.batch), decodes, chosen)


def decode_scratch(call: AttentionOperands, decodes: int) -> int:
    """What the splits of the first sequences of a step wait in."""
    if not decodes:
        return 0
    sizes = call.q.shape[1], call.q.shape[2], call.k.shape[1]
    return decode_attention_cuda.scratch(call.q, *sizes, pages_of(call.batch), decodes)


def kernels(call: AttentionOperands) -> tuple[Any, ...]:
    return decode_kernels(call, call.q.shape[0]) if all_decode(call) else (attention_kernel,)


def scratch(call: AttentionOperands) -> int:
    """What the splits of a step of decodes alone wait in."""
    return decode_scratch(call, call.q.shape[0]) if all_decode(call) else 0


def attend(call: AttentionCall) -> Tensor:
    """The fastest kernel for the batch: splits when every sequence decodes."""
    q, k, v, batch, spec, sinks = call
    if batch.pages is not None and all_decode(call):
        return decode_attention_cuda.decode(q.flatten(1), q.shape[1], q.shape[2], batch.pages, spec, sinks=sinks)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    prefill(out, q, k, v, batch.offsets, batch, spec, sinks=sinks)
    return out


class SeenBlocks(NamedTuple):
    """Which blocks of keys blocks of queries see, of so many tokens each: kept [kv_heads, lists, blocks], counts
    [kv_heads, lists] int32."""

    kept: Tensor
    counts: Tensor
    tokens: int


def prefill(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    bounds: Tensor | None = None,
    sinks: Tensor | None = None,
    sums: Tensor | None = None,
    kept: DcpShard = ALL_KEYS,
    blocks: SeenBlocks | None = None,
    invariant: bool = False,
) -> None:
    """One launch for sequences of any lengths, into out [tokens, heads, head_dim].

    starts: [sequences] int32, from which row of the batch on each sequence's queries are run; `batch.offsets` for all
    rows, and without pages. bounds: [2] int32, sequences from the first to below the second have such rows; None: any
    may. The other rows of `out` stay as they are. sums: [tokens, heads] float32, takes the logarithms of the sums of
    exponentials. kept: which keys of a sequence the pages hold. blocks: None: all keys are seen. invariant: the bits of
    a row are those of `batch_invariant_decode_kernel`, too.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if tokens == 0:
        return
    offsets, pages = batch.offsets, batch.pages
    sequences = offsets.shape[0] - 1
    if pages is None:
        lengths, tables, table_stride, page_size = offsets, offsets, 0, 0
        k_stride, v_stride = k.stride(0), v.stride(0)
        exponents: tuple[Tensor | None, Tensor | None] = (None, None)
    else:
        k, v, lengths, tables = pages.keys[spec.layer], pages.values[spec.layer], pages.lengths, pages.tables
        table_stride, page_size, exponents = tables.stride(0), pages.page_size, pages.exponents(spec.layer)
        k_stride = v_stride = kv_heads * head_dim
    group = heads // kv_heads
    tile = invariant_tile(head_dim, q.dtype, decode=False) if invariant else mixed_tile(head_dim, q.dtype, page_size)
    queries = tile.rows // group
    if blocks is not None:  # a tile is a part of a block
        queries = min(blocks.tokens, tile.rows // next_power_of_2(group))
    # Before Hopper operands of products take registers too: under the cap hundreds of bytes would spill.
    capped = DeviceLimits.of(q.device).capability >= (9, 0)
    attention_kernel[(kv_heads, tokens // queries + sequences)](
        *(q, k, v, *exponents, out),
        *((None, None) if blocks is None else blocks[:2]),
        *(starts, offsets, bounds, lengths, tables, sinks),
        *(sequences, spec.scale * LOG2_E, q.stride(0), k_stride, v_stride, table_stride),
        *((None, None) if blocks is None else (blocks.kept.shape[2], blocks.kept.shape[1])),
        *(sums, kept.rank),
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad(head_dim),
        PAGE_SIZE=page_size,
        WINDOW=spec.window or 0,
        TILE_QUERIES=queries,
        RANKS=kept.ranks,
        BLOCK=0 if blocks is None else blocks.tokens,
        SEGMENT_KEYS=SEGMENT_KEYS,
        SEGMENTS=SEGMENTS if invariant else 0,
        **tile.options,
        maxnreg=tile.registers if capped else None,
    )
