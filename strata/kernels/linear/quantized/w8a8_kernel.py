"""The Triton kernel of products in 8 bits, activations and weights: integers by rows, and floats by blocks.

Tensor cores of Hopper add up products of 8-bit floats with some 14 bits; sums over a block of columns are therefore
added up in float32, which the scales of blocks ask for in any case (DeepSeek-V3, 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.batch_invariant import InvariantTile, tile_at
from strata.kernels.quant.dequantize import wide_scale
from strata.kernels.triton_import import jit, tl


@jit
def w8a8_kernel(
    x,
    values,
    x_scales,
    scales,
    row_scales,
    bias,
    result,
    rows,
    out,
    width,
    x_groups,
    scale_stride,
    ROW_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MEMBERS: tl.constexpr = 8,
):
    """Persistent programs take tiles [BLOCK_M, BLOCK_N] of the result in turn, operands through the copy engine.

    x [rows, width], values [out, width]: descriptors of int8 or e4m3. x_scales [rows, x_groups] float32, scales [out /
    ROW_GROUP, width / GROUP]; GROUP: columns that share a scale, a multiple of BLOCK_K, or 0: all.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(out, BLOCK_N)
    kind: tl.constexpr = tl.int32 if x.dtype == tl.int8 and GROUP == 0 else tl.float32
    # Flattened with the loop inside it, so that a tile's first operands arrive while the one before it is stored.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=GROUP == 0):
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, MEMBERS)
        first_row = tile_m * BLOCK_M
        first_column = tile_n * BLOCK_N
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        # Clamped instead of masked: what lies beyond the edge is never stored.
        x_scale = x_scales + tl.minimum(row, rows - 1).to(tl.int64) * x_groups
        own = tl.minimum(column, out - 1)
        scale = scales + (own // ROW_GROUP if ROW_GROUP > 0 else own * 0).to(tl.int64) * scale_stride
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=kind)
        for k in range(0, width, BLOCK_K):
            left = x.load([first_row, k])
            right = values.load([first_column, k]).T
            if GROUP == 0:
                total = tl.dot(left, right, total, out_dtype=kind)
            else:
                sums = tl.dot(left, right, out_dtype=tl.int32 if x.dtype == tl.int8 else tl.float32).to(tl.float32)
                of_x = tl.load(x_scale + k // GROUP)
                total += sums * of_x[:, None] * wide_scale(tl.load(scale + k // GROUP))[None, :]
        wide = total.to(tl.float32)
        if GROUP == 0:
            wide *= tl.load(x_scale)[:, None] * wide_scale(tl.load(scale))[None, :]
        if row_scales is not None:
            wide *= tl.load(row_scales + own)[None, :]
        if bias is not None:
            wide += tl.load(bias + own).to(tl.float32)[None, :]
        result.store([first_row, first_column], wide.to(result.dtype))


WIDTH = 128
_INTEGERS = (
    InvariantTile(128, 256, 8, 3, WIDTH),
    InvariantTile(128, 128, 8, 4, WIDTH),
    InvariantTile(64, 64, 4, 6, WIDTH),
)
_BLOCKS = _INTEGERS[1:]


def choose_tile(rows: int, out: int, grouped: bool, processors: int) -> InvariantTile:
    """The widest that leaves a tile for each processor. Integers have the same sums in all of them."""
    tiles = _BLOCKS if grouped else _INTEGERS
    full = (tile for tile in tiles if ceil_div(rows, tile.rows) * ceil_div(out, tile.columns) >= processors)
    return next(full, tiles[-1])
