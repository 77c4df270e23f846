"""The norm behind a sum of what this rank has and what another has sent: three summands in one pass over memory."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.norm.norm import inverse_rms, row_tile, scaled
from strata.kernels.triton_import import jit, tl


@partial(jit, unspecialized=("rows",))
def received_rms_norm_kernel(
    x, received, residual, weight, result, rows, residual_stride, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    held = (row < rows) & (column < width)
    own = tl.load(x + row * width + column, mask=held, other=0.0)
    other = tl.load(received + row * width + column, mask=held, other=0.0)
    carried = tl.load(residual + row * residual_stride + column, mask=held, other=0.0)
    of_ranks = (own.to(tl.float32) + other.to(tl.float32)).to(own.dtype)
    values = (of_ranks.to(tl.float32) + carried.to(tl.float32)).to(own.dtype)
    factor = tl.load(weight + column, mask=column < width, other=0.0)
    normed = scaled(values, inverse_rms(values, width, eps), factor)
    tl.store(x + row * width + column, values, mask=held)
    tl.store(result + row * width + column, normed, mask=held)


def received_rms_norm(
    x: Tensor, received: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of `x + received`, rounded to x.dtype, and residual; the first result is in the memory of x.

    x, received [rows, width] contiguous, residual [rows, width], weight [width], all of one dtype.
    """
    result = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        tile, warps = row_tile(width)
        received_rms_norm_kernel[(ceil_div(rows, tile["ROWS"]),)](
            x, received, residual, weight, result, rows, residual.stride(0), width, eps, **tile, num_warps=warps
        )
    return x, result


def fits(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """x: contiguous, as the tensor beside it that is received."""
    alike = x.shape == residual.shape and x.dtype == residual.dtype == weight.dtype
    return alike and x.dim() == 2 and x.shape[1] <= 16384 and residual.stride(1) == 1 and x.dtype != torch.float64


def compile_cases() -> list[CompileCase]:
    pointers = dict.fromkeys(("x", "received", "residual", "weight", "result"), "*bf16:16")
    signature = pointers | {"rows": "i32", "residual_stride": "i32:16", "width": "i32:16", "eps": "fp32"}
    cases = []
    for width in (4096, 8192):
        tile, warps = row_tile(width)
        name = f"received_rms_norm of {width}"
        cases.append(CompileCase(name, received_rms_norm_kernel, signature, dict(tile), warps, 2))
    return cases
