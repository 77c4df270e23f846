"""Keys and values of one sequence out of its pages, side by side as a library wants them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.state.kv_write import TILE_WARPS, token_tile
from strata.kernels.state.paged import PagedKV
from strata.kernels.triton_import import jit, tl


@partial(jit, unspecialized=("table", "first", "tokens"))
def kv_read_kernel(
    keys,
    values,
    table,
    k,
    v,
    first,
    tokens,
    width,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [tokens / TOKENS]: `width` elements of each token, padded to BLOCK."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    element = tl.arange(0, BLOCK)[None, :]
    position = first + token
    page = tl.load(table + position // PAGE_SIZE, mask=token < tokens, other=0).to(tl.int64)
    source = (page * PAGE_SIZE + position % PAGE_SIZE)[:, None] * width + element
    held = (token < tokens)[:, None] & (element < width)
    key = tl.load(keys + source, mask=held)
    value = tl.load(values + source, mask=held)
    target = token.to(tl.int64)[:, None] * width + element
    tl.store(k + target, key, mask=held)
    tl.store(v + target, value, mask=held)


def kv_read(pages: PagedKV, layer: int, sequence: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Keys and values [last - first, kv_heads, head_dim] of positions [first, last) of a sequence, which it has."""
    keys, values = pages.keys[layer], pages.values[layer]
    shape = (last - first, *keys.shape[2:])
    k, v = (torch.empty(shape, dtype=pool.dtype, device=pool.device) for pool in (keys, values))
    width = keys.shape[2] * keys.shape[3]
    tile = token_tile(width)
    kv_read_kernel[(ceil_div(last - first, tile["TOKENS"]),)](
        keys,
        values,
        pages.tables[sequence],
        k,
        v,
        first,
        last - first,
        width,
        PAGE_SIZE=pages.page_size,
        **tile,
        num_warps=TILE_WARPS,
    )
    return k, v


def compile_cases() -> list[CompileCase]:
    signature = dict.fromkeys(("keys", "values", "k", "v"), "*bf16:16") | {"table": "*i32", "width": "i32:16"}
    signature |= dict.fromkeys(("first", "tokens"), "i32")
    return [CompileCase("kv_read", kv_read_kernel, signature, {"PAGE_SIZE": 16, **token_tile(1024)}, TILE_WARPS, 2)]
