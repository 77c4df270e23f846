"""Products of many rows with a packed weight (prompts, large batches), for which arithmetic counts.

Where the scheme rounds activations, both operands stay in 8 bits; else the weight becomes floats, in a buffer of its
size, and the product is that of these. One that is 2:4 sparse is kept in rows of values and places, which few rows
stream as they are: cuSPARSELt, all that torch has for sparse tensor cores of Hopper, wants an order of its own that it
does not tell, and to make it in every call, by way of the dense weight, takes as long as 8,192 rows by the dense
weights of 8B (docs/sparsity.md). So the zeros are multiplied, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear import batch_invariant
from strata.kernels.linear.quantized.small_m import ordered
from strata.kernels.linear.quantized_linear import WAYS, QuantizedCall, QuantizedWay
from strata.kernels.op import ATEN, CUBLAS, Operation
from strata.kernels.quant.dequantize import can_dequantize, dequantize, dequantize_kernel
from strata.kernels.quant.expand import can_expand, expand_kernel, expand_on_device
from strata.kernels.quant.quantized import QuantizedWeight, dense
from strata.kernels.quant.round_rows import round_rows, round_rows_kernel

_round = round_rows.bind("cuda")


def quantized_call(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> QuantizedCall:
    """The operands of `quantized_linear` that those of `linear` become: x [..., width], weight [out, width]."""
    rows = ordered(x.reshape(-1, x.shape[-1]), weight)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    values, scales = _round(rows, weight.kind, weight.columns, weight.input_scale)
    return QuantizedCall(values, scales, weight, bias, x.dtype)


def implement_many_rows(linear: Operation) -> None:
    """Register for `linear` of packed weights what multiplies many rows; the first that fits is preferred."""
    for way in WAYS:
        _implement_rounded(linear, way)
    for name, floats, can_make, kernel in (
        ("2:4 expanded", lambda weight, dtype: expand_on_device(weight), _can_expand, expand_kernel),
        ("dequantized", dequantize, lambda weight, dtype: can_dequantize(weight), dequantize_kernel),
    ):
        _implement_floats(linear, name, floats, can_make, kernel)
    linear.implement("unpacked, cublas", "cuda", kernels=(ATEN, CUBLAS), packed=True, scratch=_bytes_of_floats)(
        _unpacked
    )


def _with_order(*kernels: Any) -> Any:
    def launched(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> tuple[Any, ...]:
        return kernels if weight.order is None else (ATEN, *kernels)

    return launched


def _implement_rounded(linear: Operation, way: QuantizedWay) -> None:
    def supports(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> bool:
        return way.fits(x, weight, x.dtype)

    def run(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        return way.run(quantized_call(x, weight, bias)).view(*x.shape[:-1], weight.shape[0])

    def scratch(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> int:
        """Of rows in the order of the weight, of them in 8 bits, of their scales and the weight's, in float32, and what
        multiplies holds."""
        out, width = weight.shape
        copy, rows = 0 if weight.order is None else x.nbytes, x.numel() // width
        groups = ceil_div(width, weight.columns) if weight.columns else 1
        return copy + x.numel() + 4 * (rows * groups + out) + way.scratch(x, weight)

    kernels = _with_order(round_rows_kernel, way.kernel)
    linear.implement(way.name, "cuda", supports=supports, kernels=kernels, packed=True, scratch=scratch)(run)


def _implement_floats(
    linear: Operation,
    name: str,
    floats: Callable[[QuantizedWeight, torch.dtype], Tensor],
    can_make: Callable[[QuantizedWeight, torch.dtype], bool],
    kernel: Any,
) -> None:
    """x is not rounded, whatever the scheme says. In fixed tiles a row has the same bits, however many there are."""

    def supports(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> bool:
        return can_make(weight, x.dtype)

    def supports_fixed(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> bool:
        return can_make(weight, x.dtype) and x.dtype != torch.float64 and x.stride(-1) == 1

    def run(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight, bias=None: product(ordered(x, weight), floats(weight, x.dtype), bias)

    told: dict[str, Any] = {"packed": True, "scratch": _bytes_of_floats}
    by_library, in_tiles = _with_order(kernel, CUBLAS), _with_order(kernel, batch_invariant.linear_kernel)
    linear.implement(f"{name}, cublas", "cuda", supports=supports, kernels=by_library, **told)(run(F.linear))
    told |= {"invariant": True, "supports": supports_fixed, "kernels": in_tiles}
    linear.implement(f"{name}, fixed tiles", "cuda", **told)(run(batch_invariant.triton_linear))


def _can_expand(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    return can_expand(weight) and dtype == weight.values.dtype


def _unpacked(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """What any device can: the weight in floats by torch."""
    return F.linear(x, dense(weight, x.dtype), bias)


def _bytes_of_floats(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> int:
    """Of the weight in floats, and rows in its order."""
    return weight.shape[0] * weight.shape[1] * x.element_size() + (0 if weight.order is None else x.nbytes)
