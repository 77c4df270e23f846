"""The dense layer in tiles of a fixed shape, in which a row of the result has the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div
from strata.kernels.triton_import import jit, tl

_VECTOR = 4


def buffered_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in tiles of a fixed number of rows, so that the library never learns how many rows there are.

    Libraries choose their kernel, and with it the order of the sum, by the shape and the alignment of the operands.
    Here every call has the same shape, and the rows lie in the same aligned buffer. Stale rows of the buffer cannot
    reach the others: a row of a product depends on one row of its left operand.
    """
    out, width = weight.shape
    rows = x.reshape(-1, width)
    # What a row has beyond whole vectors, MKL sums by its place in the tile: widths are whole, with zeros.
    weight = F.pad(weight, (0, -width % _VECTOR)) if width % _VECTOR else weight
    tile = _tile_rows(weight)
    result = x.new_empty((rows.shape[0], out))
    buffer = x.new_zeros((tile, weight.shape[1]))
    product = x.new_empty((tile, out))
    for start in range(0, rows.shape[0], tile):
        count = min(tile, rows.shape[0] - start)
        buffer[:count, :width].copy_(rows[start : start + count])
        torch.mm(buffer, weight.t(), out=product)
        result[start : start + count].copy_(product[:count])
    if bias is not None:
        result += bias
    return result.view(*x.shape[:-1], out)


def _tile_rows(weight: Tensor) -> int:
    """Rows of a tile. A small float32 weight stays in the processor's L2 cache, where short tiles cost little."""
    return 8 if weight.dtype == torch.float32 and weight.numel() <= 1 << 18 else 32


@jit
def tile_at(place, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Which tile of rows and which of columns stands at a place of their order.

    Programs that run together share rows of x and of the weight: GROUP tiles of rows for each tile of columns.
    """
    group = place // (GROUP * tiles_n)
    first = group * GROUP
    members = min(tiles_m - first, GROUP)
    within = place % (GROUP * tiles_n)
    return first + within % members, within // members


@partial(jit, unspecialized=("rows",))
def linear_kernel(
    x,
    weight,
    bias,
    result,
    rows,
    out,
    width,
    x_stride,
    weight_stride,
    SLICES: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr = 8,
):
    """width: of each of SLICES, a power of two, which are added pairwise (`sliced_linear`). bias: [out] or None."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(out, BLOCK_N)
    tile_m, tile_n = tile_at(tl.program_id(0), tiles_m, tiles_n, GROUP)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_held = row < rows
    column_held = column < out
    # Clamped instead of masked: what lies beyond the edge is computed from the last row and never stored.
    x_row = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_row = weight + tl.minimum(column, out - 1).to(tl.int64)[None, :] * weight_stride + k[:, None]
    # Sums of one, two and four slices that wait for their neighbour.
    one = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    pair = one
    four = one
    total = one
    for index in tl.static_range(SLICES):
        x_tile = x_row + index * width
        weight_tile = weight_row + index * width
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, width, BLOCK_K):
            if WHOLE_K:
                left = tl.load(x_tile)
                right = tl.load(weight_tile)
            else:
                left = tl.load(x_tile, mask=k[None, :] < width - start, other=0.0)
                right = tl.load(weight_tile, mask=k[:, None] < width - start, other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
            x_tile += BLOCK_K
            weight_tile += BLOCK_K
        if index % 2 == 0:
            one = total
        else:
            total = one + total
            if index % 4 == 1:
                pair = total
            else:
                total = pair + total
                if index % 8 == 3:
                    four = total
                else:
                    total = four + total
    if bias is not None:
        total += tl.load(bias + column, mask=column_held, other=0.0).to(tl.float32)[None, :]
    target = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=row_held[:, None] & column_held[None, :])


@dataclass(frozen=True)
class InvariantTile:
    """Rows and columns of the result that a program computes at a time, over so much of the width, and with how many
    warps and stages of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int
    width: int = 64

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.width}


# Every 16-bit tile has at least 64 rows, so all of them run the same instruction (wgmma) over the same steps of k.
_SINGLE = InvariantTile(64, 64, 4, 3, 32)
_NARROW, _SHORT = InvariantTile(64, 32, 4, 8), InvariantTile(64, 64, 4, 6)
_SMALL, _MIDDLE, _LARGE = InvariantTile(128, 64, 4, 5), InvariantTile(128, 128, 4, 4), InvariantTile(128, 256, 8, 4)
_FEW_PROGRAMS = 132


def choose_tile(rows: int, out: int, dtype: torch.dtype) -> InvariantTile:
    """The tile for a product: the widest that still gives every multiprocessor work. It does not change the bits."""
    if dtype == torch.float32:
        return _SINGLE
    if rows <= 64:
        return _NARROW if out <= 64 * _FEW_PROGRAMS else _SHORT
    for tile, programs in ((_LARGE, 2 * _FEW_PROGRAMS), (_MIDDLE, _FEW_PROGRAMS)):
        if -(-rows // tile.rows) * -(-out // tile.columns) >= programs:
            return tile
    return _SMALL


def triton_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product without split k: each element is one sum in one order, whatever the number of rows."""
    return launch_linear(
        x, weight, bias, x.dtype, 1, choose_tile(x.numel() // weight.shape[1], weight.shape[0], x.dtype)
    )


def launch_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, slices: int, tile: InvariantTile
) -> Tensor:
    """`linear_kernel`: x [..., width], weight [out, width], bias [out] or None -> [..., out] in `dtype`."""
    out, width = weight.shape
    rows = x.reshape(-1, width)
    result = torch.empty((*x.shape[:-1], out), dtype=dtype, device=x.device)
    if result.numel():
        linear_kernel[(ceil_div(rows.shape[0], tile.rows) * ceil_div(out, tile.columns),)](
            rows,
            weight,
            bias,
            result,
            rows.shape[0],
            out,
            width // slices,
            rows.stride(0),
            weight.stride(0),
            SLICES=slices,
            WHOLE_K=width // slices % tile.width == 0,
            **tile.constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return result


def fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return x.dtype != torch.float64 and weight.stride(1) == 1 and x.stride(-1) == 1
