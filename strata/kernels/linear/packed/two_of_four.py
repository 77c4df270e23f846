"""Products of many rows with a weight that is 2:4 sparse, by dense tensor cores over all of it.

A weight is kept in rows of values and places, which few rows stream as they are. cuSPARSELt, all that torch has for
sparse tensor cores of Hopper, wants an order of its own that it does not tell: to make it in every call, by way of the
dense weight, takes as long as 8,192 rows by the dense weights of 8B (docs/sparsity.md).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from strata.kernels.linear import fixed
from strata.kernels.op import CUBLAS
from strata.kernels.quant.expand import can_expand, expand_kernel, expand_on_device
from strata.kernels.quant.packed import PackedWeight


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


EXPANDED_KERNELS = (expand_kernel, CUBLAS)
FIXED_KERNELS = (expand_kernel, fixed.linear_kernel)
