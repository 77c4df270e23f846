"""Products in 8 bits, activations and weights, of some hundred rows: parts of k have programs of their own.

A tile of the result for each processor is not to be had of few rows, and one that goes over the whole width alone
takes as long as its loads take one after the other. The parts' sums meet in the program that ends last, which adds
them up in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.quant.dequantize import wide_scale
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.split_counters import split_counters
from strata.kernels.triton_import import HAS_TRITON, jit, tl

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class SplitTile:
    """What a program computes: rows and columns of the result over a part of the width, so much of it at a time."""

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int = 4
    width: int = 128

    def fits(self, width: int) -> bool:
        return width % (self.splits * self.width) == 0


# Of more rows the library's tiles, or those of `rounded_kernel`, keep all processors busy.
MOST_SPLIT_ROWS = 256
# Weights with more rows have tiles enough that are wide.
_NARROW_OUT, _LEAST_PART = 8192, 4096


def split_tile(rows: int, out: int, width: int, processors: int) -> SplitTile | None:
    """The tile for so many rows by a weight [out, width], fitted to products of 8B on an H200; None: another way is
    better."""
    if rows > MOST_SPLIT_ROWS or width % 128:
        return None
    if out > _NARROW_OUT:
        wide = SplitTile(128, 256, 1, 8) if rows <= 128 else SplitTile(256, 128, 1, 8)
        return SplitTile(64, 128, 1, 4) if rows <= 64 else wide
    held = 64 if rows <= 64 else 128
    tiles = ceil_div(out, 64) * ceil_div(rows, held)
    # Six stages take most of a processor's memory.
    tile = SplitTile(held, 64, 1, 4, stages=6 if tiles <= processors else 4)
    divided = replace(tile, splits=2)
    pays = 2 * tiles <= processors and width >= 2 * _LEAST_PART and divided.fits(width)
    return divided if pays else tile


@partial(jit, unspecialized=("rows",))
def split_product_kernel(
    x,
    values,
    x_scales,
    scales,
    row_scales,
    bias,
    result,
    parts,
    counters,
    rows,
    out,
    part,
    scale_stride,
    ROW_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Programs [tiles of columns, SPLITS, tiles of rows]; part: columns of k of each.

    x [rows, width], values [out, width]: descriptors of int8 or e4m3. x_scales [rows] float32, scales [out /
    ROW_GROUP].
    """
    kind: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
    tile, split = tl.program_id(0), tl.program_id(1)
    first_row, first_column = tl.program_id(2) * BLOCK_M, tile * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=kind)
    for k in range(split * part, (split + 1) * part, BLOCK_K):
        total = tl.dot(x.load([first_row, k]), values.load([first_column, k]).T, total, out_dtype=kind)
    last = True
    if SPLITS > 1:
        offset = tl.program_id(2) * tl.num_programs(0) + tile
        element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        first = parts + offset.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N) + element
        tl.store(first + split * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()  # all of a program's sums are there before it arrives
        last = tl.atomic_add(counters + offset, 1, sem="acq_rel") == SPLITS - 1
    if last:
        row = first_row + tl.arange(0, BLOCK_M)
        column = first_column + tl.arange(0, BLOCK_N)
        own = tl.minimum(column, out - 1)
        if SPLITS > 1:
            # Past the nearest cache, which knows nothing of other programs' writes.
            total = tl.load(first, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(first + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(counters + offset, 0)
        scale = wide_scale(tl.load(scales + (own // ROW_GROUP if ROW_GROUP > 0 else own * 0) * scale_stride))
        if row_scales is not None:
            scale *= tl.load(row_scales + own)
        wide = total.to(tl.float32) * tl.load(x_scales + tl.minimum(row, rows - 1))[:, None] * scale[None, :]
        if bias is not None:
            wide += tl.load(bias + own).to(tl.float32)[None, :]
        held = (row < rows)[:, None] & (column < out)[None, :]
        place = result + row.to(tl.int64)[:, None] * out + column[None, :]
        tl.store(place, wide.to(result.dtype.element_ty), mask=held)


def sums_bytes(tile: SplitTile, rows: int, out: int) -> int:
    """What the parts' sums take until they are added up."""
    tiles = ceil_div(out, tile.columns) * ceil_div(rows, tile.rows)
    return 4 * tiles * tile.splits * tile.rows * tile.columns if tile.splits > 1 else 0


def split_product(
    values: Tensor, x_scales: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, tile: SplitTile
) -> Tensor:
    """Rounded rows [rows, width] with scales [rows, 1] times a weight with scales of rows -> [rows, out] in `dtype`.

    Sums of e4m3 are those of the tensor cores within a part, in float32 over the parts.
    """
    (rows, width), out = values.shape, weight.shape[0]
    result = torch.empty((rows, out), dtype=dtype, device=values.device)
    grid = (ceil_div(out, tile.columns), tile.splits, ceil_div(rows, tile.rows))
    parts = counters = None
    if tile.splits > 1:
        sums = torch.int32 if values.dtype == torch.int8 else torch.float32
        parts = torch.empty((grid[0] * grid[2], tile.splits, tile.rows, tile.columns), dtype=sums, device=values.device)
        counters = split_counters(values.device)
    split_product_kernel[grid](
        TensorDescriptor.from_tensor(values, [tile.rows, tile.width]),
        TensorDescriptor.from_tensor(weight.values, [tile.columns, tile.width]),
        x_scales,
        weight.scales,
        weight.row_scales,
        bias,
        result,
        parts,
        counters,
        rows,
        out,
        width // tile.splits,
        weight.scales.stride(0),
        ROW_GROUP=weight.rows,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.width,
        SPLITS=tile.splits,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result


def compile_cases() -> list[CompileCase]:
    cases = []
    for kind, sums, tile in (("fp8e4nv", "fp32", SplitTile(128, 128, 4, 8)), ("i8", "i32", SplitTile(64, 128, 2, 4))):
        signature = {
            "x": f"tensordesc<{kind}[{tile.rows}, {tile.width}]>",
            "values": f"tensordesc<{kind}[{tile.columns}, {tile.width}]>",
            "result": "*bf16:16",
            "parts": f"*{sums}:16",
            "counters": "*i32:16",
        }
        signature |= dict.fromkeys(("x_scales", "scales"), "*fp32:16") | {"rows": "i32", "scale_stride": "i32"}
        signature |= dict.fromkeys(("out", "part"), "i32:16")
        constants: dict[str, object] = {"ROW_GROUP": 1, "row_scales": None, "bias": None, "SPLITS": tile.splits}
        constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.width}
        must = ("wgmma.mma_async", "s32.s8.s8" if kind == "i8" else "f32.e4m3.e4m3", "cp.async.bulk.tensor")
        title = f"split products of {kind}"
        cases.append(CompileCase(title, split_product_kernel, signature, constants, tile.warps, tile.stages, must))
    return cases
