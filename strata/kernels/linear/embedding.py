"""Token embedding: one row of a table for each token id."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _cost(tokens: Tensor, weight: Tensor, *, workload: Workload) -> Cost:
    vocab, hidden = weight.shape
    rows = min(tokens.numel(), vocab) * hidden * weight.element_size()
    written = tokens.numel() * hidden * weight.element_size()
    return Cost(read=tokens.nbytes + rows, written=written, weights=rows)


def _meta(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]), device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """`weight[tokens]`: tokens [tokens] int32 or int64, weight [vocab, hidden] -> [tokens, hidden] of weight.dtype.

    Ids are below vocab: the kernels do not check them.
    """
    return F.embedding(tokens, weight)


# Tokens stand in a step's buffer, at any address.
@partial(jit, unspecialized=("tokens", "rows"))
def embedding_kernel(tokens, weight, result, rows, weight_stride, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Programs [rows / ROWS, width / COLUMNS]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = tl.load(tokens + row, mask=row < rows, other=0).to(tl.int64)[:, None]
    held = (row < rows)[:, None] & (column < width)
    values = tl.load(weight + token * weight_stride + column, mask=held)
    tl.store(result + row[:, None] * width + column, values, mask=held)


# Elements of a tile and its warps: enough that each thread has several loads under way.
_TILE_ELEMENTS = 4096
WARPS = 4


def row_tile(width: int) -> dict[str, int]:
    columns: int = min(next_power_of_2(width), _TILE_ELEMENTS)
    return {"ROWS": _TILE_ELEMENTS // columns, "COLUMNS": columns}


def _triton(tokens: Tensor, weight: Tensor) -> Tensor:
    width = weight.shape[1]
    result = torch.empty((*tokens.shape, width), dtype=weight.dtype, device=weight.device)
    if result.numel():
        tile = row_tile(width)
        grid = (ceil_div(tokens.numel(), tile["ROWS"]), ceil_div(width, tile["COLUMNS"]))
        embedding_kernel[grid](tokens, weight, result, tokens.numel(), weight.stride(0), width, **tile, num_warps=WARPS)
    return result


def fits(tokens: Tensor, weight: Tensor) -> bool:
    return tokens.is_contiguous() and weight.stride(1) == 1


if HAS_TRITON:
    embedding.implement("triton", "cuda", invariant=True, supports=fits, kernels=(embedding_kernel,))(_triton)


@embedding.implement("gather", "cuda", invariant=True)
@embedding.implement("gather", "cpu", invariant=True)
def _gather(tokens: Tensor, weight: Tensor) -> Tensor:
    return torch.index_select(weight, 0, tokens)


def compile_cases() -> list[CompileCase]:
    signature = {"tokens": "*i32", "weight": "*bf16:16", "result": "*bf16:16", "rows": "i32"}
    signature |= {"weight_stride": "i32:16", "width": "i32:16"}
    return [
        CompileCase(f"embedding of {width}", embedding_kernel, signature, row_tile(width), WARPS, 2)
        for width in (1024, 4096)
    ]
