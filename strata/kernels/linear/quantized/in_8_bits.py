"""Which packed weights are multiplied in 8 bits by rounded rows, and on which devices."""

from __future__ import annotations

import torch

from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.quantized.w8a8_kernel import WIDTH
from strata.kernels.quant.fp8 import ALIGNMENT
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.triton_import import HAS_TRITON

# Beside the copy engine and 8-bit tensor cores, the library's scales of rows.
_HOPPER = (9, 0)


def takes_quantized_rows(weight: QuantizedWeight, dtype: torch.dtype, limits: DeviceLimits) -> bool:
    """Whether many rows of this dtype are rounded to be multiplied by it."""
    return (has_scales_of_rows(weight) or has_w8a8_kernel(weight)) and in_8_bits(dtype, weight, limits)


def multiplies_quantized_rows(weight: QuantizedWeight, dtype: torch.dtype, limits: DeviceLimits) -> bool:
    """The same of rows whose columns are as they come, which can be rounded where they are made."""
    return weight.order is None and takes_quantized_rows(weight, dtype, limits)


def has_scales_of_rows(weight: QuantizedWeight) -> bool:
    """Of those that the library multiplies by."""
    by_rows = weight.columns == 0 and weight.rows in (0, 1) and weight.activations == "row"
    return weight.kind == "e4m3" and by_rows


def has_w8a8_kernel(weight: QuantizedWeight) -> bool:
    """Of those that the Triton kernel multiplies by."""
    group, kind = weight.columns, weight.activations
    if weight.kind not in ("e4m3", "int8") or not HAS_TRITON:
        return False
    whole = kind == "row" and group == 0 and weight.kind == "int8"
    blocks = kind == "block" and group >= WIDTH and group & (group - 1) == 0 and weight.order is None
    return (whole or blocks) and weight.scales.stride(1) == 1


def in_8_bits(dtype: torch.dtype, weight: QuantizedWeight, limits: DeviceLimits) -> bool:
    """Whether the device and the library take these operands in 8 bits."""
    values = weight.values
    return (
        dtype == torch.bfloat16
        and weight.zeros is None
        and all(size % ALIGNMENT == 0 for size in values.shape)
        and values.is_contiguous()
        and values.data_ptr() % 16 == 0
        and limits.capability >= _HOPPER
    )
