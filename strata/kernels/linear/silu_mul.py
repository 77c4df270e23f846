"""The gated half of an MLP in one pass: the product with gate's and up's weights, and `silu(gate) * up` of it.

Long products on an H200 are bound by its 700 W: cuBLAS and the kernel here both hold about 690 TFLOP/s, where a short
burst reaches 800. What is saved is the product's way to memory and back, 2.6 % of a prefill of the 8B shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.choose import thresholds
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.fused import Run, fused
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.batch_invariant import InvariantTile, tile_at
from strata.kernels.linear.linear import linear
from strata.kernels.linear.small_m import SmallMProduct, implement_small_m
from strata.kernels.op import has_quantized
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.triton_import import TensorDescriptor, jit, tl


@fused(rowwise=True, product=True, gated=True, packable=(1,))
def linear_silu_mul(run: Run, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, where gate and up are the halves of the columns of `linear(x, weight, bias)`.

    x [..., width], weight [2 * inner, width] (gate's rows, then up's), bias [2 * inner] or None -> [..., inner].
    """
    gate, up = run(linear, x, weight, bias).chunk(2, -1)
    result: Tensor = run(silu_mul, gate, up)
    return result


@jit
def linear_silu_mul_kernel(
    x,
    weight,
    bias,
    result,
    rows,
    inner,
    width,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr = 16,
):
    """Persistent programs take tiles [BLOCK_M, BLOCK_N] of the result in turn, operands through the copy engine.

    weight is seen as [2, inner, width], so that a tile's columns of gate and of up are one operand.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(inner, BLOCK_N)
    # Flattened with the loop inside it, so that a tile's first operands arrive while the one before it is stored.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for k in range(0, width, BLOCK_K):
            both = weight.load([0, column, k]).reshape(2 * BLOCK_N, BLOCK_K)
            total = tl.dot(x.load([row, k]), both.T, total)
        gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        if HAS_BIAS:
            columns = column + tl.arange(0, BLOCK_N)
            held = columns < inner
            gate += tl.load(bias + columns, mask=held, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + inner + columns, mask=held, other=0.0).to(tl.float32)[None, :]
        silu = gate / (1 + tl.exp(-gate))
        result.store([row, column], (silu * up).to(result.dtype))


_TILE = InvariantTile(128, 128, 8, 3)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """The copy engine reads rows that start at multiples of 16 bytes."""
    return (
        x.dim() == 2
        and x.shape[0] >= thresholds(x.device).gated_rows
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[0] % 16 == 0
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
        and DeviceLimits.of(x.device).capability >= (9, 0)  # with a copy engine for tiles
    )


def _triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, (out, width) = x.shape[0], weight.shape
    result = torch.empty((rows, out // 2), dtype=x.dtype, device=x.device)
    tiles = ceil_div(rows, _TILE.rows) * ceil_div(out // 2, _TILE.columns)
    linear_silu_mul_kernel[(min(DeviceLimits.of(x.device).processors, tiles),)](
        TensorDescriptor.from_tensor(x, [_TILE.rows, _TILE.width]),
        TensorDescriptor.from_tensor(weight.unflatten(0, (2, -1)), [2, _TILE.columns, _TILE.width]),
        weight if bias is None else bias,
        TensorDescriptor.from_tensor(result, [_TILE.rows, _TILE.columns]),
        rows,
        out // 2,
        width,
        HAS_BIAS=bias is not None,
        **_TILE.constants,
        num_warps=_TILE.warps,
        num_stages=_TILE.stages,
    )
    return result


def _product(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> SmallMProduct:
    return SmallMProduct(x.reshape(-1, x.shape[-1]), weight, bias, gated=True)


def _scratch(*given: Any) -> int:
    """Of the product, and what it takes itself where that is more than the halves' result."""
    result: int = linear_silu_mul.meta(*given).nbytes
    return 2 * result + max(0, linear.bind("cuda", packed=has_quantized(given)).scratch(*given) - result)


implement_small_m(linear_silu_mul, _product)
linear_silu_mul.in_triton(_triton, supports=_fits, kernels=(linear_silu_mul_kernel,))
one_after_the_other, _ = (
    linear_silu_mul.unfused("linear, silu_mul", "cuda", packed=packed, scratch=_scratch) for packed in (False, True)
)
