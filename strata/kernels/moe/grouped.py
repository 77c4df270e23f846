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
from strata.kernels.compile_case import CompileCase, cases_of, on_meta
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.grouped_kernels import grouped_kernel, packed_grouped_kernel
from strata.kernels.moe.grouped_tiles import GroupedTile, choose_tile, group_of
from strata.kernels.quant.packed import PackedWeight, pack
from strata.kernels.quant.schemes import SCHEMES

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
    x_scales: of x in 8 bits as `round_rows` made it, by a weight of `reads_rounded`; dtype: then of the result. Sums
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
    alpha, limit = clamp or NO_CLAMP
    # Either kernel has one operand, and its size, that the other has not.
    kernel: Any = grouped_kernel
    own, size = x_scales, None if x_scales is None else x_scales.shape[1]
    known: dict[str, Any] = {"TURNED": tile.turned, "num_stages": tile.stages}
    values, scales, row_scales, groups = weight, None, None, (0, 0)
    if isinstance(weight, PackedWeight):
        values, scales, row_scales = weight.values, weight.scales, weight.row_scales
        groups = weight.rows, weight.columns if rounded else group_of(weight)
        if not rounded:
            kernel, own, size = packed_grouped_kernel, weight.zeros, values.shape[-1]
            known = {"KIND": weight.kind, "STEPS": tile.steps, "STAGES": tile.stages}
    kernel[((min(count, rows) + rows // tile.rows) * ceil_div(out, tile.columns),)](
        x,
        values,
        scales,
        own,
        row_scales,
        bias,
        ends,
        source,
        result,
        count,
        out,
        width,
        None if rounded else x.stride(0),
        size,
        None if scales is None else scales.shape[1],
        None if scales is None else scales.shape[2],
        per_token,
        float(alpha),
        float(limit),
        ROW_GROUP=groups[0],
        GROUP=groups[1],
        EXPERTS=max(128, next_power_of_2(count)),
        GATED=gated,
        CLAMPED=clamp is not None,
        WHOLE_K=width % (tile.width * tile.steps) == 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.width,
        num_warps=tile.warps,
        **known,
    )
    return result


def compile_cases() -> list[CompileCase]:
    """Of floats every tile; of packed weights bytes by rows, four-bit floats with biases, of a width that no step
    divides, integers with zeros, and blocks; of rows in 8 bits by rows and by blocks."""
    copied = "cp.async.cg.shared.global"
    cases = []
    for name, dtype, each, width, must in (
        *(("bf16", torch.bfloat16, each, 2880, "mma") for each in (1, 20, 40, 200)),
        ("bf16", torch.bfloat16, 1, 2044, "mma"),
        ("fp16", torch.float16, 1, 2880, "mma"),
        ("fp32", torch.float32, 1, 2880, "fma.rn.f32"),
    ):
        x, weight = on_meta(each * 32, width, dtype=dtype), on_meta(32, 256, width, dtype=dtype)
        cases += _cases(f"{name} of {width}, {each} rows an expert", x, weight, (must,), biased=each == 1)
    for scheme, each, width, wanted in (
        ("fp8", 4, 2048, ("mma.sync", "ld.shared.v4.b32", copied)),
        ("mxfp4", 20, 2880, ("mma.sync", copied)),
        ("int4", 4, 2048, ("mma.sync", "lop3.b32", copied)),
        ("fp8_block", 40, 2048, ("wgmma.mma_async", copied)),
    ):
        packed = pack(on_meta(32, 256, width), SCHEMES[scheme])
        if scheme == "int4":
            packed = packed._replace(zeros=on_meta(*packed.scales.shape, dtype=torch.uint8))
        title = f"{scheme}, {each} rows an expert"
        cases += _cases(title, on_meta(each * 32, width), packed, wanted, biased=scheme == "mxfp4")
    for scheme, each, kinds in (
        ("fp8", 4, "f32.e4m3.e4m3"),
        ("int8", 200, "s32.s8.s8"),
        ("fp8_block", 200, "f32.e4m3.e4m3"),
    ):
        packed = pack(on_meta(32, 256, 2048), SCHEMES[scheme])
        x = on_meta(each * 32, 2048, dtype=packed.values.dtype)
        scales = on_meta(each * 32, packed.scales.shape[2], dtype=torch.float32)
        wanted = ("wgmma.mma_async", kinds, copied)
        cases += _cases(
            f"{scheme} in 8 bits, {each} rows an expert", x, packed, wanted, x_scales=scales, dtype=torch.bfloat16
        )
    return cases


def _cases(
    name: str, x: Tensor, weight: Tensor | PackedWeight, must: tuple[str, ...], biased: bool = False, **more: Any
) -> list[CompileCase]:
    """Of the product that fetches rows and gates, and of the one that does neither."""
    ends, source = on_meta(32, dtype=torch.int32), on_meta(len(x), dtype=torch.int64)
    gated: dict[str, Any] = {"source": source, "per_token": 4, "gated": True}
    gated |= {"bias": on_meta(32, 256), "clamp": Clamp(1.702, 7.0)} if biased else {}
    first = cases_of(f"with a gate, {name}", grouped_product, x, weight, ends, must=must, **gated, **more)
    return first + cases_of(name, grouped_product, x, weight, ends, must=must, **more)
