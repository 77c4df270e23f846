"""Rows of keys and values in 8 bits: each row of a head has one power of two that its values are multiplied by.

So what a row stands for is exact in bfloat16 (e4m3 has four significant bits, int8 at most eight), whatever reads it,
and a row's bits depend on the row alone. The powers are E8M0, 2^(s - 127) (OCP Microscaling Formats specification 1.0,
2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.quant.quantized import E8M0_BIAS

# By the type of the values: the exponent of the largest, and the bits of its mantissa in float32.
# 448 is 1.75 * 2^8, 127 is 1.984375 * 2^6.
LARGEST = {torch.float8_e4m3fn: (8, 0x600000), torch.int8: (6, 0x7E0000)}
_MANTISSA = 0x7FFFFF


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> values of `dtype` (float8_e4m3fn or int8) and the exponents [...] uint8 of their rows.

    The power of two is the least with which the row's largest magnitude is no larger than the type's. A row of which
    not all is finite stands for NaN; what is not, is zero among its values.
    """
    wide = x.float()
    finite = wide.isfinite()
    numbers = torch.where(finite, wide, 0.0)
    bits = numbers.abs().amax(-1).contiguous().view(torch.int32)
    exponent, mantissa = LARGEST[dtype]
    exponents = (bits >> 23) - exponent + ((bits & _MANTISSA) > mantissa)
    exponents = exponents.clamp(1, 253)
    scaled = torch.ldexp(numbers, (E8M0_BIAS - exponents)[..., None])
    if dtype == torch.int8:
        scaled = torch.round(scaled).clamp(-127, 127)
    return scaled.to(dtype), torch.where(finite.all(-1), exponents, 255).to(torch.uint8)


def widen_rows(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """What values [..., head_dim] and exponents [...] stand for, in `dtype`."""
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - E8M0_BIAS)
    powers = torch.where(exponents == 255, torch.nan, powers)
    return (values.float() * powers[..., None]).to(dtype)
