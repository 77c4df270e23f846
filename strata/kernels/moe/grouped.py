"""One product over all experts of a mixture, each with the rows of its own, in a launch that asks nothing of the host.

It fetches the rows itself, adds biases and gates. With few rows an expert the weights are what is read, and tiles of
few rows keep them coming; with many the library's grouped product is faster (`strata.kernels.moe.experts`). Of packed
weights, too, only packed bytes are read: values become floats in registers, or the rows are in 8 bits already.

`choose_tile`, `reads`: what a program makes at a time, and which weights the kernels read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.activation.silu_mul import Clamp
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.grouped_kernels import grouped_kernel, quantized_grouped_kernel
from strata.kernels.quant.dequantize import E4M3_CAPABILITY
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.triton_import import HAS_TRITON

# Of products in 8 bits: columns of a step, and the fewest that may share a scale.
_ROUNDED_WIDTH = 128
# The first whose tensor cores multiply 8-bit floats.
_HOPPER = (9, 0)


class GroupedTile(NamedTuple):
    """The part of a result that a program makes, [rows, columns], in blocks of `width` columns of x, `steps` a turn;
    turned: see `grouped_kernel`."""

    rows: int
    columns: int
    width: int
    warps: int
    stages: int
    turned: bool = False
    steps: int = 1


def choose_tile(
    rows: int, weight: Tensor | QuantizedWeight, *, gated: bool, rounded: bool = False, shared_bytes: int = SHARED_BYTES
) -> GroupedTile | None:
    """For that many rows by a weight of all experts; rounded: rows in 8 bits. None where columns that share a scale fit
    no step."""
    each = rows / weight.shape[0]
    if isinstance(weight, Tensor):
        tile: GroupedTile | None = _of_floats(each, weight, gated=gated)
    else:
        tile = (_of_8_bits if rounded else _converted)(each, weight, gated=gated)
    return None if tile is None else fitting(tile, weight, gated=gated, rounded=rounded, shared_bytes=shared_bytes)


def fitting(
    tile: GroupedTile,
    weight: Tensor | QuantizedWeight,
    *,
    gated: bool,
    rounded: bool = False,
    shared_bytes: int = SHARED_BYTES,
) -> GroupedTile:
    """The tile with as many of its stages as shared memory holds."""
    values = weight if isinstance(weight, Tensor) else weight.values
    of_values = tile.columns * (2 if gated else 1) * values.shape[-1] * tile.width // weight.shape[-1]
    of_x = tile.rows * tile.width * (1 if rounded else values.itemsize if values is weight else 2)
    stage = tile.steps * (of_values * values.itemsize + of_x)
    return tile._replace(stages=max(1, min(tile.stages, shared_bytes // stage)))


def _of_floats(each: float, weight: Tensor, *, gated: bool) -> GroupedTile:
    """The fastest on an H200 for so many rows of an expert, from times of the shapes of 30B-A3B, V2-Lite, gpt-oss-20b
    and granite-4.0-h-tiny (benchmarks/results/h200_grouped.jsonl)."""
    if weight.dtype == torch.float32 or weight.shape[-1] % 8:
        # Without 16 bytes of a row together, operands pass through registers.
        return GroupedTile(64, 32 if gated else 64, 32, 4, 3)
    if each <= 12:
        return GroupedTile(16, 64, 128, 4, 3, turned=True)
    if each <= 28:
        return GroupedTile(32, 64, 64, 4, 5, turned=True) if gated else GroupedTile(32, 64, 128, 4, 3, turned=True)
    return _of_many_rows(each, 64, gated=gated)


def _of_many_rows(each: float, width: int, *, gated: bool) -> GroupedTile:
    if each <= 48:
        return GroupedTile(64, 64, width, 4, 4) if gated else GroupedTile(64, 128, width, 4, 3)
    return GroupedTile(128, 128, width, 8, 4) if gated else GroupedTile(128, 256, width, 8, 4)


def _of_8_bits(each: float, weight: QuantizedWeight, *, gated: bool) -> GroupedTile:
    """Those of floats for rows of as many bytes. Where blocks of columns have scales of their own, no step has two."""
    grouped = weight.columns > 0
    wide = _ROUNDED_WIDTH if grouped else 2 * _ROUNDED_WIDTH
    if each <= 12:
        return GroupedTile(16, 64, wide, 4, 6 if grouped else 3, turned=True)
    if each <= 28:
        return GroupedTile(32, 64, _ROUNDED_WIDTH if gated else wide, 4, 5 if gated else 3, turned=True)
    if grouped:  # sums over blocks take registers of their own
        columns, warps = (128, 8) if each > 48 or not gated else (64, 4)
        return GroupedTile(64, columns, _ROUNDED_WIDTH, warps, 4, turned=True)
    return _of_many_rows(each, _ROUNDED_WIDTH, gated=gated)


def _converted(each: float, weight: QuantizedWeight, *, gated: bool) -> GroupedTile | None:
    """A rule that was not fitted to measurements yet; `benchmarks.quantized_experts --tiles` times others.

    Two warps take `mma.sync`, eight `wgmma`, its left operand in registers.
    """
    group = group_of(weight)
    halves, sums = weight.kind in ("int4", "e2m1"), group > 0 and weight.kind != "e2m1"
    # 128 bytes of a row of the weight a turn, where registers hold them: sums over groups take some of their own.
    if each <= 10:
        tile = GroupedTile(8 if each <= 3 else 16, 64, 128, 2, 3, steps=2 if halves else 1)
        if sums and gated and tile.rows == 16:
            tile = tile._replace(width=64, steps=2 * tile.steps if group >= 64 else 2)
        elif sums and not halves:
            tile = tile._replace(stages=4)
    elif each <= 28:
        tile = GroupedTile(32, 64, 64, 2, 3, steps=4 if halves else 2)
        if sums and gated:
            tile = tile._replace(columns=32, steps=2) if halves else tile._replace(stages=4, steps=1)
        elif weight.zeros is not None:
            tile = tile._replace(steps=2)
    else:
        tile = GroupedTile(64 if each <= 56 or (gated and sums) else 128, 128, 64, 8, 4)
    for step in (tile.width, 64, 32):
        # Two bytes of four-bit floats have one scale, so that registers hold them together.
        if not group or group % step == 0 or (weight.kind == "e2m1" and group % 4 == 0 and step % group == 0):
            return tile._replace(width=min(step, tile.width))
    return None


def group_of(weight: QuantizedWeight) -> int:
    """Columns that share a scale, 0: all."""
    return weight.columns if weight.columns < weight.shape[-1] else 0


def reads(x: Tensor, weight: Tensor | QuantizedWeight) -> bool:
    """Whether the kernels read rows like x, not rounded, and a weight of all experts."""
    if isinstance(weight, Tensor):
        known = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        return known and x.stride(-1) == 1 and weight.is_contiguous()
    scales, zeros = weight.scales, weight.zeros
    return (
        HAS_TRITON
        and weight.kind in ("e4m3", "int8", "int4", "e2m1")
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and weight.shape[-1] % 2 == x.stride(0) % 2 == x.data_ptr() % 4 == 0
        and all(one.is_contiguous() for name, one in weight.tensors.items() if name != "order")
        and (zeros is None or weight.kind == "int4")
        and (weight.kind != "e4m3" or DeviceLimits.of(weight.device).capability >= E4M3_CAPABILITY)
        # With these a four-bit float times its scale is exact.
        and (
            weight.kind != "e2m1" or (x.dtype == torch.bfloat16 and scales.dtype in (torch.uint8, torch.float8_e4m3fn))
        )
        and choose_tile(1, weight, gated=True) is not None
    )


def reads_quantized(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether rows like x, rounded as a weight's scheme says, are multiplied by it, of all experts."""
    group, kind = weight.columns, weight.activations
    whole = kind == "row" and group == 0
    blocks = kind == "block" and group >= _ROUNDED_WIDTH and group & (group - 1) == 0
    return (
        HAS_TRITON
        and weight.kind in ("e4m3", "int8")
        and (whole or blocks)
        and weight.zeros is None
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and weight.shape[-1] % 16 == 0
        and all(one.is_contiguous() for name, one in weight.tensors.items() if name != "order")
        and DeviceLimits.of(weight.device).capability >= _HOPPER
    )


# Of a gate and what it opens, before the activation: gpt-oss bounds both.
NO_CLAMP = Clamp(1.0, 0.0)


def grouped_product(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    ends: Tensor,
    *,
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    source: Tensor | None = None,
    per_token: int = 1,
    gated: bool = False,
    bias: Tensor | None = None,
    clamp: Clamp | None = None,
    tile: GroupedTile | None = None,
) -> Tensor:
    """`x @ weight[e]^T + bias[e]` for the rows of each expert e: x [rows, width], weight [experts, out, width], result
    [rows, out].

    ends: [experts] int32, where the rows of each expert end; those of the first begin at 0. Rows behind the last end
    are not computed. x and a plain weight are of one dtype of 16 or 32 bits, the weight contiguous, and the elements of
    a row of x side by side; of a packed weight that the kernels read (`reads`), the columns are in the order of x's.
    x_scales: of x in 8 bits as `round_rows` made it, by a weight of `reads_quantized`; dtype: then of the result. Sums
    are float32. bias: [experts, out] of that dtype, contiguous, or None.
    source: [rows] int64; row r is then row source[r] // per_token of x, [tokens, width]. gated: weight is [experts, 2 *
    out, width], the rows of gate before those of up, the bias likewise, and the result `silu(gate) * up`, or
    `clamped_swiglu` with a `clamp`, rounded once. tile: None for that of the rule.
    """
    rows, (count, out, width) = len(x if source is None else source), weight.shape
    out = out // 2 if gated else out
    result = torch.empty((rows, out), dtype=dtype or x.dtype, device=x.device)
    if not result.numel():
        return result
    rounded, shared = x_scales is not None, DeviceLimits.of(x.device).shared_bytes
    tile = tile or choose_tile(rows, weight, gated=gated, rounded=rounded, shared_bytes=shared)
    assert tile is not None
    # Either kernel has one operand, and its size, that the other has not.
    kernel: Any = grouped_kernel
    own, size = x_scales, None if x_scales is None else x_scales.shape[1]
    known: dict[str, Any] = {"TURNED": tile.turned, "num_stages": tile.stages}
    values, scales, row_scales, groups = weight, None, None, (0, 0)
    if isinstance(weight, QuantizedWeight):
        values, scales, row_scales = weight.values, weight.scales, weight.row_scales
        groups = weight.rows, weight.columns if rounded else group_of(weight)
        if not rounded:
            kernel, own, size = quantized_grouped_kernel, weight.zeros, values.shape[-1]
            known = {"KIND": weight.kind, "STEPS": tile.steps, "STAGES": tile.stages}
    known |= {"ROW_GROUP": groups[0], "GROUP": groups[1], "EXPERTS": max(128, next_power_of_2(count)), "GATED": gated}
    known |= {"CLAMPED": clamp is not None, "WHOLE_K": width % (tile.width * tile.steps) == 0}
    known |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.width, "num_warps": tile.warps}
    tensors = (x, values, scales, own, row_scales, bias, ends, source, result)
    sizes = (count, out, width, None if rounded else x.stride(0), size)
    of_scales = (None, None) if scales is None else scales.shape[1:]
    alpha, limit = map(float, clamp or NO_CLAMP)
    grid = ((min(count, rows) + rows // tile.rows) * ceil_div(out, tile.columns),)
    kernel[grid](*tensors, *sizes, *of_scales, per_token, alpha, limit, **known)
    return result
