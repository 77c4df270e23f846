"""One product over all experts of a mixture, each with the rows of its own, in a launch that asks nothing of the host.

It fetches the rows itself, adds biases and gates. With few rows an expert the weights are what is read, and tiles of
few rows keep them coming; with many the library's grouped product is faster (`strata.kernels.moe.experts`). Of packed
weights, too, only packed bytes are read: values become floats in registers, or the rows are in 8 bits already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.activation.clamped_swiglu import Clamp
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.grouped_kernels import grouped_kernel, quantized_grouped_kernel
from strata.kernels.moe.grouped_tiles import GroupedTile, choose_tile, group_of
from strata.kernels.quant.packed import PackedWeight

# Of a gate and what it opens, before the activation: gpt-oss bounds both.
NO_CLAMP = Clamp(1.0, 0.0)


def grouped_product(
    x: Tensor,
    weight: Tensor | PackedWeight,
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
    if isinstance(weight, PackedWeight):
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
