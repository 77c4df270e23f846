"""One product over all experts of a mixture, each with the rows of its own, in a launch that asks nothing of the host.

For what the library's grouped product does not take on the device alone: other floats than bfloat16, rows that do not
begin at multiples of 16 bytes, GPUs before Hopper; and for what it does not do: fetching the rows and gating.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.fixed import Tile
from strata.kernels.triton_import import jit, tl


# What varies from step to step and model to model must not compile anew.
@partial(jit, unspecialized=("count", "per_token"))
def grouped_kernel(
    x,
    weight,
    ends,
    source,
    result,
    count,
    out,
    width,
    x_stride,
    per_token,
    FETCH: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [rows // BLOCK_M + count, out / BLOCK_N]: a tile of rows of one expert each.

    FETCH: row r is that of token source[r] // per_token. GATED: a weight has as many rows for the gate before its own.
    """
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
    from_row = tl.minimum(row, end - 1).to(tl.int64)
    if FETCH:
        from_row = tl.load(source + from_row) // per_token
    x_tile = x + from_row[:, None] * x_stride + k[None, :]
    weight += tl.cast(expert, tl.int64) * out * width * (2 if GATED else 1)
    weight_tile = weight + tl.minimum(column, out - 1).to(tl.int64)[None, :] * width + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if GATED:
        gate_tile = weight_tile
        weight_tile += tl.cast(out, tl.int64) * width
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, width, BLOCK_K):
        if WHOLE_K:
            left = tl.load(x_tile)
            right = tl.load(weight_tile)
        else:
            left = tl.load(x_tile, mask=k[None, :] < width - at, other=0.0)
            right = tl.load(weight_tile, mask=k[:, None] < width - at, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        if GATED:
            opening = tl.load(gate_tile) if WHOLE_K else tl.load(gate_tile, mask=k[:, None] < width - at, other=0.0)
            gate = tl.dot(left, opening, gate, input_precision="ieee")
            gate_tile += BLOCK_K
        x_tile += BLOCK_K
        weight_tile += BLOCK_K
    if GATED:
        total *= gate / (1 + tl.exp(-gate))
    target = result + row.to(tl.int64)[:, None] * out + column[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & (column < out)[None, :])


def _tile(dtype: torch.dtype, *, whole: bool, gated: bool) -> Tile:
    # Where rows do not begin at multiples of 16 bytes all three operands pass through registers.
    columns = 32 if gated and not whole else 64
    return Tile(64, columns, 4, 3, 32) if dtype == torch.float32 else Tile(64, columns, 4, 4)


def _is_whole(width: int, dtype: torch.dtype) -> bool:
    return width % _tile(dtype, whole=True, gated=False).width == 0


def grouped_product(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    source: Tensor | None = None,
    per_token: int = 1,
    gated: bool = False,
) -> Tensor:
    """`x @ weight[e]^T` for the rows of each expert e: x [rows, width], weight [experts, out, width] -> [rows, out].

    ends: [experts] int32, where the rows of each expert end; those of the first begin at 0. Rows behind the last end
    are not computed. x and weight are of one dtype of 16 or 32 bits, weight contiguous, and the elements of a row of x
    side by side. Sums are float32.
    source: [rows] int64; row r is then row source[r] // per_token of x, [tokens, width]. gated: weight is [experts, 2 *
    out, width], the rows of gate before those of up, and the result `silu(gate) * up`, rounded once.
    """
    rows, (count, out, width) = len(x if source is None else source), weight.shape
    out = out // 2 if gated else out
    result = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    if result.numel():
        whole = _is_whole(width, x.dtype)
        tile = _tile(x.dtype, whole=whole, gated=gated)
        grouped_kernel[(rows // tile.rows + count, ceil_div(out, tile.columns))](
            x,
            weight,
            ends,
            source,
            result,
            count,
            out,
            width,
            x.stride(0),
            per_token,
            FETCH=source is not None,
            GATED=gated,
            WHOLE_K=whole,
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
        for whole, gated in product((True, False), (False, True)):
            tile = _tile(dtype, whole=whole, gated=gated)
            signature = dict.fromkeys(("x", "weight", "result"), f"*{kind}:16") | {"ends": "*i32:16", "count": "i32"}
            signature |= dict.fromkeys(("out", "width", "x_stride"), "i32:16" if whole else "i32")
            signature |= {"source": "*i64:16", "per_token": "i32"}
            constants = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.width}
            constants |= {"FETCH": gated, "GATED": gated, "WHOLE_K": whole}
            must = ("fma.rn.f32",) if kind == "fp32" else ("wgmma.mma_async",)
            name = f"{'gated ' if gated else ''}grouped product {kind}{'' if whole else ' of any width'}"
            cases.append(CompileCase(name, grouped_kernel, signature, constants, tile.warps, tile.stages, must))
    return cases
