"""A product for each head, in tiles of one shape: a row of the result has the same bits in any company."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div
from strata.kernels.triton_import import jit, tl


@partial(jit, unspecialized=("tokens",))
def head_product_kernel(
    x,
    weight,
    result,
    tokens,
    out,
    width,
    x_token,
    x_head,
    weight_head,
    weight_out,
    weight_width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [blocks of tokens, blocks of columns, heads]; result [tokens, heads, out]."""
    head = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    left = x + row.to(tl.int64) * x_token + head * x_head + k[None, :]
    right = weight + head.to(tl.int64) * weight_head + column * weight_out + k[:, None] * weight_width
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = k < width - start
        one = tl.load(left, mask=(row < tokens) & inside[None, :], other=0.0)
        other = tl.load(right, mask=(column < out) & inside[:, None], other=0.0)
        total = tl.dot(one, other, total, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K * weight_width
    target = result + (row.to(tl.int64) * tl.num_programs(2) + head) * out + column
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < tokens) & (column < out))


_TILE, _OPTIONS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, {"num_warps": 4, "num_stages": 3}


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, heads, width], weight [heads, out, width] of any strides -> [tokens, heads, out]."""
    (tokens, heads, width), out = x.shape, weight.shape[1]
    result = torch.empty((tokens, heads, out), dtype=x.dtype, device=x.device)
    if result.numel():
        head_product_kernel[(ceil_div(tokens, _TILE["BLOCK_M"]), ceil_div(out, _TILE["BLOCK_N"]), heads)](
            x, weight, result, tokens, out, width, *x.stride()[:2], *weight.stride(), **_TILE, **_OPTIONS
        )
    return result
