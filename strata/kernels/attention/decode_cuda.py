"""Attention of a decode step on CUDA: the grid and the arguments of its kernel.

The grid follows from shapes alone, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention.decode_join import join_constants, join_decodes_kernel
from strata.kernels.attention.decode_tile import DecodeTile, decode_tile, shape_constants
from strata.kernels.attention.decode_triton import decode_attention_kernel
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.split_counters import MAX_COUNTERS, split_counters
from strata.kernels.state.dcp_shard import ALL_KEYS, DcpShard
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.quantized_triton import rounding_constants

# Query heads of a KV head that registers hold beside a tile of keys.
MAX_GROUP = 32


def fits(pages: PagedKV, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether registers hold the tiles, and each KV head of each sequence has a counter."""
    return head_dim <= 256 and heads // kv_heads <= MAX_GROUP and pages.tables.shape[0] * kv_heads <= MAX_COUNTERS


@dataclass(frozen=True)
class Unfinished:
    """What is to be done to queries and keys before attention: the arguments of `qk_rope_kv_write` by their names."""

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None


def scratch_bytes(
    sequences: int,
    max_keys: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    rounded: bool,
    some: bool = False,
) -> int:
    """What the splits of decoding sequences wait in, where a sequence may have so many keys. rounded: of pools in 8
    bits. some: see `decode_tile`."""
    splits = decode_tile(heads, kv_heads, head_dim, dtype, sequences, max_keys, rounded=rounded, some=some).splits
    return 4 * sequences * splits * heads * (head_dim + 1)


def scratch(q: Tensor, heads: int, head_dim: int, kv_heads: int, pages: PagedKV, decodes: int) -> int:
    """`scratch_bytes` of the first sequences of a step."""
    tile = _tile(q, heads, head_dim, kv_heads, pages, decodes, pages.tables.shape[1])
    return 4 * decodes * tile.splits * heads * (head_dim + 1)


def kernels(
    q: Tensor, heads: int, head_dim: int, kv_heads: int, pages: PagedKV, decodes: int, chosen: int | None = None
) -> tuple[Any, ...]:
    """What the first sequences of a step launch, over so many chosen pages of each or all."""
    if not decodes:
        return ()
    tile = _tile(q, heads, head_dim, kv_heads, pages, decodes, pages.tables.shape[1] if chosen is None else chosen)
    return (decode_attention_kernel, join_decodes_kernel) if tile.has_kernel_behind else (decode_attention_kernel,)


def _tile(
    q: Tensor, heads: int, head_dim: int, kv_heads: int, pages: PagedKV, decodes: int, page_limit: int
) -> DecodeTile:
    most = page_limit * pages.page_size
    some = pages.parts is not None and pages.parts.decodes is None
    return decode_tile(heads, kv_heads, head_dim, q.dtype, decodes, most, rounded=pages.is_quantized, some=some)


def decode(
    product: Tensor,
    heads: int,
    head_dim: int,
    pages: PagedKV,
    spec: AttentionSpec,
    unfinished: Unfinished | None = None,
    tile: DecodeTile | None = None,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    sums: Tensor | None = None,
    kept: DcpShard = ALL_KEYS,
) -> Tensor:
    """`attention` where row s of the product is the one token of sequence s: -> [sequences, heads, head_dim].

    product: [sequences, any], the elements of a row side by side: queries, whose keys are in the pages; or, with what
    is left to do to them, queries, keys and values. The block tables of pages may be [sequences, kv_heads, pages], one
    for each KV head. tile: None: that of `decode_tile`. out: takes the result, whose elements lie side by side in it.
    sinks: as for `attention`. sums: [sequences, heads] float32, takes the logarithms of the sums of exponentials. kept:
    which keys of a sequence the pages hold.
    """
    keys, values, tables = pages.keys[spec.layer], pages.values[spec.layer], pages.tables
    sequences, kv_heads, group = tables.shape[0], keys.shape[2], heads // keys.shape[2]
    if out is None:
        out = torch.empty((sequences, heads, head_dim), dtype=product.dtype, device=product.device)
    if sequences == 0:
        return out
    if tile is None:
        tile = _tile(product, heads, head_dim, kv_heads, pages, sequences, tables.shape[-1])
    results = torch.empty((sequences, tile.splits, heads, head_dim), dtype=torch.float32, device=product.device)
    scales = torch.empty((sequences, tile.splits, heads), dtype=torch.float32, device=product.device)
    todo = unfinished or Unfinished()
    early = tile.early and unfinished is not None and DeviceLimits.of(product.device).capability >= (9, 0)
    constants = shape_constants(group, head_dim, tile)
    window = spec.window or 0
    decode_attention_kernel[(kv_heads, sequences, tile.splits)](
        *(product, keys, values, *pages.exponents(spec.layer), out, results, scales, split_counters(product.device)),
        *(pages.lengths, pages.slot_mapping, tables, todo.cos, todo.sin, todo.q_weight, todo.k_weight, sinks),
        *(todo.eps, spec.scale * log2(e), head_dim, product.stride(0), tables.stride(-2), tile.split),
        *(sums, kept.rank),
        EARLY=early,
        PAGE_SIZE=pages.page_size,
        WINDOW=window,
        OF_HEADS=tables.dim() == 3,
        RANKS=kept.ranks,
        **constants,
        **(rounding_constants(keys.dtype) if pages.is_quantized else {}),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=early,
    )
    if tile.has_kernel_behind:
        behind = DeviceLimits.of(product.device).capability >= (9, 0)
        join_decodes_kernel[(heads, sequences)](
            *(results, scales, out, sums, pages.lengths, kept.rank, tile.split, tile.splits),
            HEAD_DIM=head_dim,
            HEAD_PAD=constants["HEAD_PAD"],
            WINDOW=window,
            BLOCK_N=tile.keys,
            RANKS=kept.ranks,
            EARLY=behind,
            launch_pdl=behind,
            **join_constants(head_dim),
        )
    return out
