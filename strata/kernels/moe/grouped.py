"""One product over all experts of a mixture, each with the rows of its own, in a launch that asks nothing of the host.

It fetches the rows itself, adds biases and gates. With few rows an expert the weights are what is read, and tiles of
few rows keep them coming; with many the library's grouped product is faster (`strata.kernels.moe.experts`).
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.activation.clamped_swiglu import Clamp
from strata.kernels.compile_case import CompileCase
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.triton_import import jit, tl


@jit
def expert_of_tile(ends, tile, count, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Which expert a tile of BLOCK_M rows is of, `count` if of none, and what `rows_of_tile` is to be told."""
    number = tl.arange(0, EXPERTS)
    known = number < count
    starts = tl.load(ends + number - 1, mask=known & (number > 0), other=0)
    stops = tl.load(ends + number, mask=known, other=0)
    tiles = (stops - starts + BLOCK_M - 1) // BLOCK_M
    behind = tl.cumsum(tl.where(known, tiles, 0), 0)
    return tl.sum((behind <= tile).to(tl.int32), 0), starts, tiles, behind, stops


@jit
def rows_of_tile(expert, tile, starts, tiles, behind, stops, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The first row of a tile, and where those of its expert end."""
    mine = tl.arange(0, EXPERTS) == expert
    first = tl.sum(tl.where(mine, starts + (tile - behind + tiles) * BLOCK_M, 0), 0)
    return first, tl.sum(tl.where(mine, stops, 0), 0)


@jit
def gated_by(total, gate, alpha, limit, CLAMPED: tl.constexpr):
    """What a gate leaves of what it opens; CLAMPED: as `clamped_swiglu`."""
    if CLAMPED:
        # By comparisons, which let NaN through.
        gate = tl.where(gate > limit, limit, gate)
        total = tl.where(total > limit, limit, tl.where(total < -limit, -limit, total))
        total = (total + 1) * gate / (1 + tl.exp(-alpha * gate))
    else:
        total *= gate / (1 + tl.exp(-gate))
    return total


# What varies from step to step and model to model must not compile anew.
@partial(jit, unspecialized=("count", "per_token"))
def grouped_kernel(
    x,
    weight,
    bias,
    ends,
    source,
    result,
    count,
    out,
    width,
    x_stride,
    per_token,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    FETCH: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE_K: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [as many tiles as there can be * out / BLOCK_N]: a tile of rows of one expert each, all columns of a
    tile side by side, which so find its rows in the cache.

    EXPERTS: a power of two, at least `count`. FETCH: row r is that of token source[r] // per_token. GATED: a weight has
    as many rows for the gate before its own; CLAMPED: within the bounds of `clamped_swiglu`. TURNED: the weight is the
    left operand, of which tensor cores take at least 64 rows, and so a tile may have fewer rows of x.
    """
    columns = tl.cdiv(out, BLOCK_N)
    tile = tl.program_id(0) // columns
    expert, starts, tiles, behind, stops = expert_of_tile(ends, tile, count, EXPERTS, BLOCK_M)
    if expert >= count:
        return
    first, end = rows_of_tile(expert, tile, starts, tiles, behind, stops, EXPERTS, BLOCK_M)
    row = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Clamped instead of masked: what lies beyond the edge is computed from the last row and never stored.
    from_row = tl.minimum(row, end - 1).to(tl.int64)
    if FETCH:
        from_row = tl.load(source + from_row) // per_token
    x_tile = x + from_row[:, None] * x_stride + k[None, :]
    weight += tl.cast(expert, tl.int64) * out * width * (2 if GATED else 1)
    weight_tile = weight + tl.minimum(column, out - 1).to(tl.int64)[:, None] * width + k[None, :]
    gate_tile = weight_tile
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if TURNED else tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate = total
    if GATED:
        weight_tile += tl.cast(out, tl.int64) * width
    for at in range(0, width, BLOCK_K):
        if WHOLE_K:
            rows = tl.load(x_tile)
            matrix = tl.load(weight_tile)
        else:
            rows = tl.load(x_tile, mask=k[None, :] < width - at, other=0.0)
            matrix = tl.load(weight_tile, mask=k[None, :] < width - at, other=0.0)
        if TURNED:
            total = tl.dot(matrix, tl.trans(rows), total, input_precision="ieee")
        else:
            total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
        if GATED:
            opening = tl.load(gate_tile) if WHOLE_K else tl.load(gate_tile, mask=k[None, :] < width - at, other=0.0)
            if TURNED:
                gate = tl.dot(opening, tl.trans(rows), gate, input_precision="ieee")
            else:
                gate = tl.dot(rows, tl.trans(opening), gate, input_precision="ieee")
            gate_tile += BLOCK_K
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    if TURNED:
        total = tl.trans(total)
        gate = tl.trans(gate)
    held = column < out
    if BIASED:
        bias += expert * out * (2 if GATED else 1)
        if GATED:
            gate += tl.load(bias + column, mask=held, other=0.0).to(tl.float32)[None, :]
            bias += out
        total += tl.load(bias + column, mask=held, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = gated_by(total, gate, alpha, limit, CLAMPED)
    target = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & held[None, :])


class GroupedTile(NamedTuple):
    """The part of a result that a program makes, [rows, columns], in steps of `width`; turned: see `grouped_kernel`."""

    rows: int
    columns: int
    width: int
    warps: int
    stages: int
    turned: bool = False


def choose_tile(
    rows: int, count: int, width: int, dtype: torch.dtype, *, gated: bool, shared_bytes: int = SHARED_BYTES
) -> GroupedTile:
    """The fastest on an H200 for that many rows of that many experts, with as many stages as shared memory holds."""
    tile = _fastest(rows, count, width, dtype, gated=gated)
    stage = (tile.rows + tile.columns * (2 if gated else 1)) * tile.width * dtype.itemsize
    return tile._replace(stages=max(1, min(tile.stages, shared_bytes // stage)))


def _fastest(rows: int, count: int, width: int, dtype: torch.dtype, *, gated: bool) -> GroupedTile:
    """From times of the shapes of 30B-A3B, V2-Lite, gpt-oss-20b and granite-4.0-h-tiny
    (benchmarks/results/h200_grouped.jsonl)."""
    if dtype == torch.float32 or width % 8:  # without 16 bytes of a row together, operands pass through registers
        return GroupedTile(64, 32 if gated else 64, 32, 4, 3)
    each = rows / count
    if each <= 12:
        return GroupedTile(16, 64, 128, 4, 3, turned=True)
    if each <= 28:
        return GroupedTile(32, 64, 64, 4, 5, turned=True) if gated else GroupedTile(32, 64, 128, 4, 3, turned=True)
    if each <= 48:
        return GroupedTile(64, 64, 64, 4, 4) if gated else GroupedTile(64, 128, 64, 4, 3)
    return GroupedTile(128, 128, 64, 8, 4) if gated else GroupedTile(128, 256, 64, 8, 4)


# Of a gate and what it opens, before the activation: gpt-oss bounds both.
NO_CLAMP = Clamp(1.0, 0.0)


def grouped_product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    source: Tensor | None = None,
    per_token: int = 1,
    gated: bool = False,
    bias: Tensor | None = None,
    clamp: Clamp | None = None,
) -> Tensor:
    """`x @ weight[e]^T + bias[e]` for the rows of each expert e: x [rows, width], weight [experts, out, width], result
    [rows, out].

    ends: [experts] int32, where the rows of each expert end; those of the first begin at 0. Rows behind the last end
    are not computed. x and weight are of one dtype of 16 or 32 bits, weight contiguous, and the elements of a row of x
    side by side. Sums are float32. bias: [experts, out] of that dtype, contiguous, or None.
    source: [rows] int64; row r is then row source[r] // per_token of x, [tokens, width]. gated: weight is [experts, 2 *
    out, width], the rows of gate before those of up, the bias likewise, and the result `silu(gate) * up`, or
    `clamped_swiglu` with a `clamp`, rounded once.
    """
    rows, (count, out, width) = len(x if source is None else source), weight.shape
    out = out // 2 if gated else out
    result = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    if result.numel():
        shared = DeviceLimits.of(x.device).shared_bytes
        tile = choose_tile(rows, count, width, x.dtype, gated=gated, shared_bytes=shared)
        alpha, limit = clamp or NO_CLAMP
        tiles = min(count, rows) + rows // tile.rows
        grouped_kernel[(tiles * ceil_div(out, tile.columns),)](
            x,
            weight,
            weight if bias is None else bias,
            ends,
            ends if source is None else source,
            result,
            count,
            out,
            width,
            x.stride(0),
            per_token,
            float(alpha),
            float(limit),
            **_constants(tile, count, width),
            FETCH=source is not None,
            GATED=gated,
            CLAMPED=clamp is not None,
            BIASED=bias is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return result


def _constants(tile: GroupedTile, count: int, width: int) -> dict[str, Any]:
    return {
        "EXPERTS": max(128, next_power_of_2(count)),
        "WHOLE_K": width % tile.width == 0,
        "TURNED": tile.turned,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.width,
    }


def compile_cases() -> list[CompileCase]:
    cases = []
    for kind, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        for each, width, gated in product((1, 20, 40, 200), (2880, 2044), (False, True)):
            if each > 1 and (kind != "bf16" or width % 8):
                continue
            tile = choose_tile(each * 32, 32, width, dtype, gated=gated)
            by_16 = "i32" if width % 16 else "i32:16"
            signature = dict.fromkeys(("x", "weight", "bias", "result"), f"*{kind}:16") | {"ends": "*i32:16"}
            signature |= dict.fromkeys(("out", "width", "x_stride"), by_16) | {"count": "i32", "per_token": "i32"}
            signature |= {"source": "*i64:16" if gated else "*i32:16", "alpha": "fp32", "limit": "fp32"}
            constants = _constants(tile, 32, width) | {"FETCH": gated, "GATED": gated}
            constants |= dict.fromkeys(("CLAMPED", "BIASED"), gated and each == 1)
            must = ("fma.rn.f32",) if kind == "fp32" else ("mma",)
            name = f"{'gated ' if gated else ''}grouped product {kind} of {width}, {each} rows an expert"
            cases.append(CompileCase(name, grouped_kernel, signature, constants, tile.warps, tile.stages, must))
    return cases
