"""The dense layer of rows that are in 8 bits already, by a weight in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.packed import many_rows
from strata.kernels.linear.packed.many_rows import RoundedCall
from strata.kernels.linear.packed.rounded_kernel import rounded_product_kernel
from strata.kernels.linear.packed.split_product import split_product_kernel
from strata.kernels.op import CUBLAS, operation
from strata.kernels.quant.packed import Scheme, product_of, spread


def _cost(call: RoundedCall, *, workload: Workload) -> Cost:
    values, scales, weight, bias, dtype = call
    (rows, width), out = values.shape, weight.shape[0]
    weights = weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(
        flops=2 * rows * width * out + (0 if bias is None else rows * out),
        read=values.nbytes + scales.nbytes + weights,
        written=rows * out * dtype.itemsize,
        weights=weights,
    )


def _meta(call: RoundedCall) -> Tensor:
    return torch.empty((call.values.shape[0], call.weight.shape[0]), dtype=call.dtype, device="meta")


@operation(_cost, operands=RoundedCall, meta=_meta, rowwise=True, dense=True)
def rounded_linear(call: RoundedCall) -> Tensor:
    """What `linear` makes of x: -> [rows, out] of x's dtype."""
    values, scales, weight, bias, dtype = call
    groups = Scheme(weight.kind, 1, weight.columns if weight.activations == "block" else 0)
    rows = values.float() * spread(scales, groups, values.shape)
    return product_of(rows, weight, bias, dtype)


for _name, _run, _fits, _kernel in (
    ("rounded, split", many_rows.split_of_rounded, many_rows.fits_split_of_rounded, split_product_kernel),
    (
        "rounded, triton",
        many_rows.product_of_rounded,
        many_rows.fits_product_of_rounded,
        rounded_product_kernel,
    ),
    ("rounded, cublas", many_rows.scaled_mm_of_rounded, many_rows.fits_scaled_mm_of_rounded, CUBLAS),
):
    rounded_linear.implement(_name, "cuda", supports=_fits, kernels=(_kernel,), packed=True)(_run)
