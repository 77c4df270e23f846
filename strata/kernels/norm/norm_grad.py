"""The gradients of `rms_norm` and `add_rms_norm` on CUDA: one pass over the rows, which keeps the sums of the weight's.

Importing this file registers them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div
from strata.kernels.norm.norm import add_rms_norm, alike, fits, inverse_rms, rms_norm, row_tile
from strata.kernels.plain_tensor import all_plain
from strata.kernels.triton_import import jit, tl


@jit
def rms_norm_backward_kernel(
    upstream,
    through,
    x,
    weight,
    of_x,
    of_weight,
    rows,
    width,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Every program takes tiles of ROWS rows in turn and leaves its part of the weight's gradient in its own row.

    through: what reaches x beside the norm, or None.
    """
    column = tl.arange(0, WIDTH)[None, :]
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        held = (row < rows) & (column < width)
        offset = row * width + column
        values = tl.load(x + offset, mask=held, other=0.0)
        given = tl.load(upstream + offset, mask=held, other=0.0).to(tl.float32)
        scale = inverse_rms(values, width, eps)
        normed = values.to(tl.float32) * scale
        weighted = given * factor
        slope = scale * (weighted - normed * (tl.sum(weighted * normed, 1) / width)[:, None])
        if through is not None:
            slope += tl.load(through + offset, mask=held, other=0.0).to(tl.float32)
        tl.store(of_x + offset, slope.to(of_x.dtype.element_ty), mask=held)
        # The forward pass multiplies the weight by the rounded value.
        total += given * normed.to(values.dtype).to(tl.float32)
    column = tl.arange(0, WIDTH)
    tl.store(of_weight + tl.program_id(0) * width + column, tl.sum(total, 0), mask=column < width)


# Enough programs to fill a device several times over; each leaves a row of partial sums.
_PROGRAMS = 1024


def _backward(upstream: Tensor, through: Tensor | None, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight. upstream: of the norm. through: of x itself, None if it is 0."""
    width = x.shape[-1]
    x, upstream = x.contiguous(), upstream.contiguous()
    through = None if through is None else through.contiguous()
    of_x = torch.empty_like(x)
    rows = x.numel() // width
    tile, warps = row_tile(width)
    programs = min(ceil_div(rows, tile["ROWS"]), _PROGRAMS)
    parts = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    if rows:
        rms_norm_backward_kernel[(programs,)](
            upstream,
            through,
            x,
            weight,
            of_x,
            parts,
            rows,
            width,
            eps,
            **tile,
            num_warps=warps,
        )
    return of_x, parts.sum(0).to(weight.dtype)


class _Norm(torch.autograd.Function):
    """Keeps what is normalized: x, or its sum with a residual, which is a result too. Its scale is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
        if residual is None:
            total, results = x, _rms_norm(x, weight, eps)
        else:
            total, _ = results = _add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        through, of_norm = upstream if len(upstream) == 2 else (None, *upstream)
        total, weight = ctx.saved_tensors
        if of_norm is None:
            return through, through, None, None
        of_sum, of_weight = _backward(of_norm, through, total, weight, ctx.eps)
        return of_sum, of_sum if ctx.needs_input_grad[1] else None, of_weight, None


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, None, weight, eps)  # type: ignore[no-any-return]


def _fits(x: Tensor, weight: Tensor, eps: float) -> bool:
    return all_plain(x, weight) and x.dtype == weight.dtype and fits(x, weight, eps)


def _sum_fits(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> bool:
    return alike(x, residual) and all_plain(residual) and _fits(x, weight, eps)


_rms_norm, _add_rms_norm = rms_norm.bind("cuda"), add_rms_norm.bind("cuda")
for _norm, _supports, _function in ((rms_norm, _fits, _normed), (add_rms_norm, _sum_fits, _Norm.apply)):
    _norm.in_triton(_function, "triton with gradients", differentiable=True, supports=_supports)
