"""Token embedding by a part of the table: ids of other parts get zeros, so that the parts add up to the rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.embedding import WARPS, embedding, fits, row_tile
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _cost(tokens: Tensor, weight: Tensor, first: int, *, workload: Workload) -> Cost:
    """As if all ids were here: how many are is known to the device alone."""
    return embedding.cost(tokens, weight, workload=workload)


def _meta(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]), device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def vocabulary_embedding(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """`weight[tokens - first]`, and zeros for ids that are not in [first, first + rows).

    tokens [tokens] int32 or int64, weight [rows, hidden]: the rows of ids from `first` on
    -> [tokens, hidden] of weight.dtype.
    """
    own = tokens - first
    here = (own >= 0) & (own < weight.shape[0])
    return torch.index_select(weight, 0, own.where(here, 0)).masked_fill_(~here[:, None], 0)


# Tokens stand in a step's buffer, at any address.
@partial(jit, unspecialized=("tokens", "rows", "first"))
def vocabulary_embedding_kernel(
    tokens, weight, result, rows, first, held_rows, weight_stride, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Programs [rows / ROWS, width / COLUMNS]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    own = tl.load(tokens + row, mask=row < rows, other=0).to(tl.int64) - first
    here = (own >= 0) & (own < held_rows)
    held = (row < rows)[:, None] & (column < width)
    values = tl.load(weight + own[:, None] * weight_stride + column, mask=held & here[:, None], other=0.0)
    tl.store(result + row[:, None] * width + column, values, mask=held)


def _triton(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    held_rows, width = weight.shape
    result = torch.empty((*tokens.shape, width), dtype=weight.dtype, device=weight.device)
    if result.numel():
        tile = row_tile(width)
        grid = (ceil_div(tokens.numel(), tile["ROWS"]), ceil_div(width, tile["COLUMNS"]))
        vocabulary_embedding_kernel[grid](
            tokens,
            weight,
            result,
            tokens.numel(),
            first,
            held_rows,
            weight.stride(0),
            width,
            **tile,
            num_warps=WARPS,
        )
    return result


def _fits(tokens: Tensor, weight: Tensor, first: int) -> bool:
    return fits(tokens, weight)


if HAS_TRITON:
    vocabulary_embedding.implement(
        "triton", "cuda", invariant=True, supports=_fits, kernels=(vocabulary_embedding_kernel,)
    )(_triton)
for _device in ("cpu", "cuda"):
    vocabulary_embedding.implement("gather", _device, invariant=True)(vocabulary_embedding.reference)


def compile_cases() -> list[CompileCase]:
    signature = {"tokens": "*i32", "weight": "*bf16:16", "result": "*bf16:16", "rows": "i32", "first": "i32"}
    signature |= dict.fromkeys(("held_rows", "weight_stride", "width"), "i32:16")
    return [
        CompileCase(
            f"vocabulary_embedding of {width}", vocabulary_embedding_kernel, signature, row_tile(width), WARPS, 2
        )
        for width in (1024, 8192)
    ]
