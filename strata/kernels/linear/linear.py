"""The dense layer: `x @ weight^T + bias`.

`sliced_linear`: as a sum over slices of its width in an order that does not depend on how many ranks hold them.

Ranks that divide the width of a product add their parts up. Which bits come out depends on the order of the sum, and a
product that one rank computes whole has another order than two halves. Here the width is cut into equal slices that are
added pairwise (`strata.kernels.pairwise`). Ranks with 4, 2 or 1 of eight slices have whole branches of that tree, so
that their sums, added pairwise too, have its bits. They are float32 until the last sum.

`wide_linear`: in float32 whatever its inputs are: scores of experts, which 16 bits would make equal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.device_limits import implementations_for
from strata.kernels.linear import batch_invariant, cublaslt, measured_algorithms
from strata.kernels.linear.batch_invariant import InvariantTile, buffered_linear, fits, launch_linear, linear_kernel
from strata.kernels.linear.quantized.frozen import frozen_product
from strata.kernels.linear.quantized.many_rows import implement_many_rows
from strata.kernels.linear.small_m import SmallMProduct, implement_small_m
from strata.kernels.op import ATEN, CUBLAS, operation
from strata.kernels.pairwise import pairwise_sum
from strata.kernels.quant.quantized import QuantizedWeight, dense, quantized_product, round_activations


def _cost(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, *, workload: Workload) -> Cost:
    out, width = weight.shape
    rows = x.numel() // width
    weights = weight.nbytes + (0 if bias is None else bias.nbytes)
    # What rounds activations: their largest magnitudes and a multiplication. Few rows on CUDA go without.
    rounding = 3 * x.numel() if isinstance(weight, QuantizedWeight) and weight.activations else 0
    return Cost(
        flops=2 * rows * width * out + (0 if bias is None else rows * out) + rounding,
        read=x.nbytes + weights,
        written=rows * out * x.element_size(),
        weights=weights,
    )


def _meta(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta")


@operation(_cost, meta=_meta, rowwise=True, product=True, packable=(1,))
def linear(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`: x [..., width], weight [out, width], bias [out] or None -> [..., out]; one dtype.

    A packed weight counts as what it stands for, and x as its scheme rounds it. On CUDA many rows of x are
    rounded, where both operands can be multiplied in 8 bits; others are used as they are.
    """
    if isinstance(weight, QuantizedWeight):
        return quantized_product(x, weight, bias)
    return F.linear(x, weight, bias)


linear.implement("torch", "cpu", differentiable=True)(F.linear)
linear.implement("batch-invariant tiles", "cpu", invariant=True)(batch_invariant.buffered_linear)


@linear.implement("unpacked, batch-invariant tiles", "cpu", invariant=True, packed=True)
def _unpacked(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    product = batch_invariant.buffered_linear(
        round_activations(x, weight.scheme, weight.input_scale), dense(weight)
    ).to(x.dtype)
    return product if bias is None else product + bias


def _product(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> SmallMProduct:
    return SmallMProduct(x.reshape(-1, x.shape[-1]), weight, bias)


implement_small_m(linear, _product)
linear.implement("cublaslt measured", "cuda", supports=measured_algorithms.supports, kernels=(CUBLAS,))(
    measured_algorithms.measured_linear
)
linear.implement("cublas", "cuda", differentiable=True, kernels=(CUBLAS,))(F.linear)
linear.implement(cublaslt.IMPLEMENTATION, "cuda", invariant=True, supports=cublaslt.supports, kernels=(CUBLAS,))(
    cublaslt.cublaslt_linear
)
linear.in_triton(
    batch_invariant.triton_linear,
    invariant=True,
    supports=batch_invariant.fits,
    kernels=(batch_invariant.linear_kernel,),
)
implement_many_rows(linear)


@linear.implement("of a frozen weight", "cpu", differentiable=True, packed=True)
@linear.implement("of a frozen weight", "cuda", differentiable=True, packed=True)
def _frozen(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    kind = "reference" if x.device.type == "cpu" else implementations_for(x.device)
    return frozen_product(linear.bind(kind, packed=True), x, weight, bias)


MAX_SLICES = 8


def _sliced_cost(x: Tensor, weight: Tensor, slices: int, wide: bool, *, workload: Workload) -> Cost:
    product = linear.cost(x, weight, None, workload=workload)
    elements = x.numel() // weight.shape[1] * weight.shape[0]
    widened = elements * (4 - x.itemsize) if wide and x.itemsize < 4 else 0
    return product + Cost(flops=elements * (slices - 1), written=widened)


def _sliced_meta(x: Tensor, weight: Tensor, slices: int, wide: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype, device="meta")


@operation(_sliced_cost, meta=_sliced_meta, rowwise=True, dense=True)
def sliced_linear(x: Tensor, weight: Tensor, slices: int, wide: bool) -> Tensor:
    """`x @ weight^T` as the sum over `slices` equal slices of the width, added pairwise in float32.

    x [..., width], weight [out, width], one dtype; slices: 1, 2, 4 or 8, which divide the width. wide: whether the
    result stays float32 (float64 for float64), for a sum with other ranks' results, or is rounded to x's dtype.
    -> [..., out].
    """
    total = pairwise_sum([_wide_product(*operands) for operands in _slices(x, weight, slices)])
    return total if wide else total.to(x.dtype)


def _slices(x: Tensor, weight: Tensor, slices: int) -> list[tuple[Tensor, Tensor]]:
    if slices not in (1, 2, 4, MAX_SLICES) or weight.shape[1] % slices:
        raise ValueError(
            f"{slices} slices of a width of {weight.shape[1]}; accepted are 1, 2, 4 and {MAX_SLICES} that divide it"
        )
    return list(zip(x.chunk(slices, -1), weight.chunk(slices, 1), strict=True))


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return linear.reference(x.to(dtype), weight.to(dtype), None)  # type: ignore[no-any-return]


@sliced_linear.implement("batch-invariant tiles", "cpu", invariant=True)
def _buffered(x: Tensor, weight: Tensor, slices: int, wide: bool) -> Tensor:
    """Of copies: a library may choose its order of the sum by the stride of the weight, too."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    parts = []
    for some, columns in _slices(x, weight, slices):
        own = torch.empty(columns.shape, dtype=dtype).copy_(columns)
        parts.append(buffered_linear(some.to(dtype), own))
    total = pairwise_sum(parts)
    return total if wide else total.to(x.dtype)


# Of 64 rows or more, like those of `linear_kernel`: all run the same instruction over the same steps of the width.
# Up to three sums wait beside the one that grows, so tiles are smaller.
_SINGLE = InvariantTile(64, 64, 8, 3, 32)
_FEW, _MANY = InvariantTile(64, 32, 4, 8), InvariantTile(128, 32, 8, 4)


def _tile(rows: int, dtype: torch.dtype) -> InvariantTile:
    """It does not change the bits."""
    if dtype == torch.float32:
        return _SINGLE
    return _FEW if rows <= 64 else _MANY


def _triton(x: Tensor, weight: Tensor, slices: int, wide: bool) -> Tensor:
    tile = _tile(x.numel() // weight.shape[1], x.dtype)
    return launch_linear(x, weight, None, torch.float32 if wide else x.dtype, slices, tile)


def _fits(x: Tensor, weight: Tensor, slices: int, wide: bool) -> bool:
    return fits(x, weight) and slices in (1, 2, 4, MAX_SLICES) and weight.shape[1] % slices == 0


sliced_linear.in_triton(_triton, invariant=True, supports=_fits, kernels=(linear_kernel,))


def _wide_cost(x: Tensor, weight: Tensor, *, workload: Workload) -> Cost:
    out, width = weight.shape
    rows = x.numel() // width
    written = rows * out * torch.promote_types(x.dtype, torch.float32).itemsize
    return Cost(flops=2 * rows * width * out, read=x.nbytes + weight.nbytes, written=written, weights=weight.nbytes)


def _wide_meta(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=wide, device="meta")


@operation(_wide_cost, meta=_wide_meta, rowwise=True, dense=True)
def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight^T` of the values in float32 (float64 for float64): x [..., width], weight [out, width] -> [..., out].

    As transformers' routers of DeepSeek and GLM compute their logits.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


@wide_linear.implement("batch-invariant tiles", "cpu", invariant=True)
def _fixed(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return batch_invariant.buffered_linear(x.to(wide), weight.to(wide), None)


def _is_narrow(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)


@wide_linear.implement("cublas", "cuda", supports=_is_narrow, kernels=(CUBLAS,))
def _cublas(x: Tensor, weight: Tensor) -> Tensor:
    """Products of 16 bits are exact in float32, in which tensor cores add them up."""
    rows = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
    return rows.view(*x.shape[:-1], -1)


wide_linear.by_definition("cuda", name="converted", differentiable=True, kernels=(ATEN, ATEN, CUBLAS))


def _wide_triton(x: Tensor, weight: Tensor) -> Tensor:
    return batch_invariant.triton_linear(x.to(torch.float32), weight.to(torch.float32))


wide_linear.in_triton(
    _wide_triton, invariant=True, supports=batch_invariant.fits, kernels=(ATEN, ATEN, batch_invariant.linear_kernel)
)
