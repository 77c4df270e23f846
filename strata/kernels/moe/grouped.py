"""One product over all experts of a mixture, each with the rows of its own, in a launch that asks nothing of the host.

For what the library's grouped product does not take on the device alone: other floats than bfloat16, rows that do not
begin at multiples of 16 bytes, GPUs before Hopper.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.fixed import Tile
from strata.kernels.triton_import import jit, tl


# What varies from step to step and model to model must not compile anew.
@partial(jit, unspecialized=("count",))
def grouped_kernel(
    x,
    weight,
    ends,
    result,
    count,
    out,
    width,
    x_stride,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [rows // BLOCK_M + count, out / BLOCK_N]: a tile of rows of one expert each."""
    tile = tl.program_id(0)
    # Expert e starts with tile (its first row // BLOCK_M) + e: find the last that starts at this tile or before.
    expert = 0
    beyond = count
    while beyond - expert > 1:
        middle = (expert + beyond) // 2
        if tl.load(ends + middle - 1) // BLOCK_M + middle <= tile:
            expert = middle
        else:
            beyond = middle
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    first = start + (tile - start // BLOCK_M - expert) * BLOCK_M
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Clamped instead of masked: what lies beyond the edge is computed from the last row and never stored.
    x_tile = x + tl.minimum(row, end - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight += tl.cast(expert, tl.int64) * out * width
    weight_tile = weight + tl.minimum(column, out - 1).to(tl.int64)[None, :] * width + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, width, BLOCK_K):
        if WHOLE_K:
            left = tl.load(x_tile)
            right = tl.load(weight_tile)
        else:
            left = tl.load(x_tile, mask=k[None, :] < width - at, other=0.0)
            right = tl.load(weight_tile, mask=k[:, None] < width - at, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    target = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & (column < out)[None, :])


def _tile(dtype: torch.dtype) -> Tile:
    return Tile(64, 64, 4, 3, 32) if dtype == torch.float32 else Tile(64, 64, 4, 4)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x @ weight[e]^T` for the rows of each expert e: x [rows, width], weight [experts, out, width] -> [rows, out].

    ends: [experts] int32, where the rows of each expert end; those of the first begin at 0. x and weight are of one
    dtype of 16 or 32 bits, weight contiguous, and the elements of a row of x side by side. Sums are float32.
    """
    (rows, width), (count, out, _) = x.shape, weight.shape
    result = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    if result.numel():
        tile = _tile(x.dtype)
        grouped_kernel[(rows // tile.rows + count, ceil_div(out, tile.columns))](
            x,
            weight,
            ends,
            result,
            count,
            out,
            width,
            x.stride(0),
            WHOLE_K=width % tile.width == 0,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.width,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return result


def compile_cases() -> list[CompileCase]:
    cases = []
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        tile = _tile(dtype)
        for whole in (True, False):
            signature = dict.fromkeys(("x", "weight", "result"), f"*{kind}:16") | {"ends": "*i32:16", "count": "i32"}
            signature |= dict.fromkeys(("out", "width", "x_stride"), "i32:16" if whole else "i32")
            blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.width}
            must = ("fma.rn.f32",) if kind == "fp32" else ("wgmma.mma_async",)
            name = f"grouped product {kind}{'' if whole else ' of any width'}"
            cases.append(
                CompileCase(
                    name, grouped_kernel, signature, {"WHOLE_K": whole, **blocks}, tile.warps, tile.stages, must
                )
            )
    return cases
