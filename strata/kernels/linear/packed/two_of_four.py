"""Products of many rows with a weight that is 2:4 sparse: by sparse tensor cores, or by dense ones over all of it.

A weight is kept in rows of values and places, which few rows stream as they are. cuSPARSELt, all that torch has for
sparse tensor cores of Hopper, wants an order of its own that it does not tell: it is made in every call by way of the
dense weight. On an H200 that takes 0.94 of the time of 8,192 rows by a dense weight of 8B, of which the sparse
product saves a quarter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear import fixed
from strata.kernels.op import CUBLAS
from strata.kernels.quant.expand import can_expand, expand_kernel, expand_on_device
from strata.kernels.quant.packed import PackedWeight

CUSPARSELT = "(cuSPARSELt)"
# From about 28,000 rows on, what the sparse product saves is more than what the order of the library costs.
LEAST_ROWS = 32768
_HOPPER = (9, 0)
# Of 16-bit floats: rows and columns of the sparse operand, and rows of the dense one, are multiples of these.
_SPARSE_MULTIPLE, _DENSE_MULTIPLE = 16, 8


def fits_sparse(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    rows = x.numel() // weight.shape[1]
    return (
        rows >= LEAST_ROWS
        and rows % _DENSE_MULTIPLE == 0
        and can_expand(weight)
        and all(size % _SPARSE_MULTIPLE == 0 for size in weight.shape)
        and x.dtype == weight.values.dtype
        and DeviceLimits.of(x.device).capability >= _HOPPER
        and torch.backends.cusparselt.is_available()
    )


def sparse(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """By sparse tensor cores; sums in float32."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    whole, out = expand_on_device(weight), weight.shape[0]
    if x.device.type == "meta":  # where only kernels that Triton compiles are of interest
        return x.new_empty((*x.shape[:-1], out))
    operand = torch._cslt_compress(whole)
    # The sparse operand is the first, so the product is made transposed, and written so that rows of x are its rows.
    product = torch._cslt_sparse_mm(operand, rows.t(), bias=bias, transpose_result=True)
    return product.view(*x.shape[:-1], out)


def sparse_bytes(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> int:
    """Bytes beside its result: the dense weight, and the library's; what that takes besides is its own affair."""
    return weight.numel() * weight.values.element_size() + weight.nbytes


def fits_expanded(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    return can_expand(weight) and x.dtype == weight.values.dtype


def expanded(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """By dense tensor cores: the zeros are multiplied, too."""
    return F.linear(x, expand_on_device(weight), bias)


def fits_fixed_tiles(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    return fits_expanded(x, weight, bias) and x.stride(-1) == 1


def fixed_tiles(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """However many rows there are, a row has the same bits."""
    return fixed.triton_linear(x, expand_on_device(weight), bias)


SPARSE_KERNELS = (expand_kernel, CUSPARSELT)
EXPANDED_KERNELS = (expand_kernel, CUBLAS)
FIXED_KERNELS = (expand_kernel, fixed.linear_kernel)
