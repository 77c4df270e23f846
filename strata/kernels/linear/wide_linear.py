"""The dense layer in float32 whatever its inputs are: scores of experts, which 16 bits would make equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear import fixed
from strata.kernels.op import ATEN, CUBLAS, operation


def _cost(x: Tensor, weight: Tensor, *, workload: Workload) -> Cost:
    out, width = weight.shape
    rows = x.numel() // width
    written = rows * out * torch.promote_types(x.dtype, torch.float32).itemsize
    return Cost(flops=2 * rows * width * out, read=x.nbytes + weight.nbytes, written=written, weights=weight.nbytes)


def _meta(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=wide, device="meta")


@operation(_cost, meta=_meta, rowwise=True, dense=True)
def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight^T` of the values in float32 (float64 for float64): x [..., width], weight [out, width] -> [..., out].

    As transformers' routers of DeepSeek and GLM compute their logits.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


@wide_linear.implement("fixed tiles", "cpu", invariant=True)
def _fixed(x: Tensor, weight: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return fixed.buffered_linear(x.to(wide), weight.to(wide), None)


def _is_narrow(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)


@wide_linear.implement("cublas", "cuda", supports=_is_narrow, kernels=(CUBLAS,))
def _cublas(x: Tensor, weight: Tensor) -> Tensor:
    """Products of 16 bits are exact in float32, in which tensor cores add them up."""
    rows = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
    return rows.view(*x.shape[:-1], -1)


wide_linear.by_definition("cuda", name="converted", differentiable=True, kernels=(ATEN, ATEN, CUBLAS))


def _triton(x: Tensor, weight: Tensor) -> Tensor:
    return fixed.triton_linear(x.to(torch.float32), weight.to(torch.float32))


wide_linear.in_triton(_triton, invariant=True, supports=fixed.fits, kernels=(ATEN, ATEN, fixed.linear_kernel))
