"""The grouped product with packed weights: values become floats in registers, so that only packed bytes are read.

As in products of few rows (`strata.kernels.linear.packed`), rows of x are not rounded, scales of rows and of groups
multiply sums, and four-bit floats are multiplied by their scales themselves. The tiles are a rule that was not fitted
to measurements yet; `benchmarks.packed_experts --tiles` times others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.activation.clamped_swiglu import Clamp
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.grouped import NO_CLAMP
from strata.kernels.moe.packed_grouped_kernels import packed_grouped_kernel
from strata.kernels.quant.dequantize import E4M3_CAPABILITY
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.triton_import import HAS_TRITON


class PackedTile(NamedTuple):
    """The part of a result that a program makes, [rows, columns], in blocks of `width` columns of x, `steps` a turn."""

    rows: int
    columns: int
    width: int
    warps: int
    stages: int
    steps: int = 1


def choose_tile(
    rows: int, count: int, weight: PackedWeight, *, gated: bool, shared_bytes: int = SHARED_BYTES
) -> PackedTile | None:
    """For that many rows of that many experts; None where columns that share a scale fit no step.

    Two warps take `mma.sync`, eight `wgmma`, its left operand in registers.
    """
    each, group = rows / count, group_of(weight)
    halves, sums = weight.kind in ("int4", "e2m1"), group > 0 and weight.kind != "e2m1"
    # 128 bytes of a row of the weight a turn, where registers hold them: sums over groups take some of their own.
    if each <= 10:
        tile = PackedTile(8 if each <= 3 else 16, 64, 128, 2, 3, steps=2 if halves else 1)
        if sums and gated and tile.rows == 16:
            tile = tile._replace(width=64, steps=2 * tile.steps if group >= 64 else 2)
        elif sums and not halves:
            tile = tile._replace(stages=4)
    elif each <= 28:
        tile = PackedTile(32, 64, 64, 2, 3, steps=4 if halves else 2)
        if sums and gated:
            tile = tile._replace(columns=32, steps=2) if halves else tile._replace(stages=4, steps=1)
        elif weight.zeros is not None:
            tile = tile._replace(steps=2)
    elif each <= 56 or (gated and sums):
        tile = PackedTile(64, 128, 64, 8, 4)
    else:
        tile = PackedTile(128, 128, 64, 8, 4)
    for step in (tile.width, 64, 32):
        # Two bytes of four-bit floats have one scale, so that registers hold them together.
        if not group or group % step == 0 or (weight.kind == "e2m1" and group % 4 == 0 and step % group == 0):
            return fitting(tile._replace(width=min(step, tile.width)), weight, gated=gated, shared_bytes=shared_bytes)
    return None


def fitting(tile: PackedTile, weight: PackedWeight, *, gated: bool, shared_bytes: int = SHARED_BYTES) -> PackedTile:
    """The tile with as many of its stages as shared memory holds."""
    of_values = tile.columns * (2 if gated else 1) * weight.values.shape[-1] * tile.width // weight.shape[-1]
    stage = tile.steps * (of_values + 2 * tile.rows * tile.width)
    return tile._replace(stages=max(1, min(tile.stages, shared_bytes // stage)))


def group_of(weight: PackedWeight) -> int:
    """Columns that share a scale, 0: all."""
    return weight.columns if weight.columns < weight.shape[-1] else 0


def is_readable(x: Tensor, weight: PackedWeight) -> bool:
    """Whether the kernel can read rows like x and a weight of all experts."""
    scales, zeros = weight.scales, weight.zeros
    tensors = [weight.values, scales, *(one for one in (zeros, weight.row_scales) if one is not None)]
    return (
        HAS_TRITON
        and weight.kind in ("e4m3", "int8", "int4", "e2m1")
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and x.stride(0) % 2 == x.data_ptr() % 4 == 0
        and all(one.is_contiguous() for one in tensors)
        and (zeros is None or weight.kind == "int4")
        and (weight.kind != "e4m3" or DeviceLimits.of(weight.device).capability >= E4M3_CAPABILITY)
        # With these a four-bit float times its scale is exact.
        and (
            weight.kind != "e2m1" or (x.dtype == torch.bfloat16 and scales.dtype in (torch.uint8, torch.float8_e4m3fn))
        )
        and choose_tile(1, 1, weight, gated=True) is not None
    )


def packed_grouped_product(
    x: Tensor,
    weight: PackedWeight,
    ends: Tensor,
    *,
    source: Tensor | None = None,
    per_token: int = 1,
    gated: bool = False,
    bias: Tensor | None = None,
    clamp: Clamp | None = None,
    tile: PackedTile | None = None,
) -> Tensor:
    """`grouped_product` with a packed weight [experts, out, width] that `is_readable`, its columns in the order of
    x's. tile: None for that of the rule."""
    rows, (count, out, width) = len(x if source is None else source), weight.shape
    out = out // 2 if gated else out
    result = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    if result.numel():
        shared = DeviceLimits.of(x.device).shared_bytes
        tile = tile or choose_tile(rows, count, weight, gated=gated, shared_bytes=shared)
        assert tile is not None
        alpha, limit = clamp or NO_CLAMP
        tiles = min(count, rows) + rows // tile.rows
        packed_grouped_kernel[(tiles * ceil_div(out, tile.columns),)](
            x,
            weight.values,
            weight.scales,
            weight.zeros,
            weight.row_scales,
            bias,
            ends,
            source,
            result,
            count,
            out,
            width,
            x.stride(0),
            weight.values.shape[-1],
            weight.scales.shape[1],
            weight.scales.shape[2],
            per_token,
            float(alpha),
            float(limit),
            **_constants(tile, weight, gated=gated),
            CLAMPED=clamp is not None,
            num_warps=tile.warps,
        )
    return result


def _constants(tile: PackedTile, weight: PackedWeight, *, gated: bool) -> dict[str, Any]:
    return {
        "KIND": weight.kind,
        "ROW_GROUP": weight.rows,
        "GROUP": group_of(weight),
        "EXPERTS": max(128, next_power_of_2(weight.shape[0])),
        "GATED": gated,
        "WHOLE_K": weight.shape[-1] % (tile.width * tile.steps) == 0,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.width,
        "STEPS": tile.steps,
        "STAGES": tile.stages,
    }
