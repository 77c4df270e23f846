"""Token embedding: one row of a table, or of a part of it, for each token id."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


def _cost(tokens: Tensor, weight: Tensor, first: int = 0, *, workload: Workload) -> Cost:
    """Of a part of the table as if all ids were there: how many are is known to the device alone."""
    vocab, hidden = weight.shape
    rows = min(tokens.numel(), vocab) * hidden * weight.element_size()
    written = tokens.numel() * hidden * weight.element_size()
    return Cost(read=tokens.nbytes + rows, written=written, weights=rows)


def _meta(tokens: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]), device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """`weight[tokens]`: tokens [tokens] int32 or int64, weight [vocab, hidden] -> [tokens, hidden] of weight.dtype.

    Ids are below vocab: the kernels do not check them.
    """
    return F.embedding(tokens, weight)


@operation(_cost, meta=_meta, rowwise=True)
def vocabulary_embedding(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """`weight[tokens - first]`, and zeros for ids that are not in [first, first + rows): those of parts add up.

    tokens [tokens] int32 or int64, weight [rows, hidden]: the rows of ids from `first` on
    -> [tokens, hidden] of weight.dtype.
    """
    own = tokens - first
    here = (own >= 0) & (own < weight.shape[0])
    return torch.index_select(weight, 0, own.where(here, 0)).masked_fill_(~here[:, None], 0)


# Tokens stand in a step's buffer, at any address.
@partial(jit, unspecialized=("tokens", "rows", "first"))
def embedding_kernel(
    tokens, weight, result, rows, first, held_rows, weight_stride, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Programs [rows / ROWS, width / COLUMNS]. first, held_rows: of `vocabulary_embedding`, or None."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = tl.load(tokens + row, mask=row < rows, other=0).to(tl.int64)
    if first is None:
        held = (row < rows)[:, None] & (column < width)
        values = tl.load(weight + token[:, None] * weight_stride + column, mask=held)
    else:
        own = token - first
        here = (own >= 0) & (own < held_rows)
        held = (row < rows)[:, None] & (column < width)
        values = tl.load(weight + own[:, None] * weight_stride + column, mask=held & here[:, None], other=0.0)
    tl.store(result + row[:, None] * width + column, values, mask=held)


# Elements of a tile and its warps: enough that each thread has several loads under way.
_TILE_ELEMENTS, _WARPS = 4096, 4


def _row_tile(width: int) -> dict[str, int]:
    columns: int = min(next_power_of_2(width), _TILE_ELEMENTS)
    return {"ROWS": _TILE_ELEMENTS // columns, "COLUMNS": columns}


def _triton(tokens: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    held_rows, width = weight.shape
    result = torch.empty((*tokens.shape, width), dtype=weight.dtype, device=weight.device)
    if result.numel():
        tile = _row_tile(width)
        embedding_kernel[ceil_div(tokens.numel(), tile["ROWS"]), ceil_div(width, tile["COLUMNS"])](
            tokens,
            weight,
            result,
            tokens.numel(),
            first,
            None if first is None else held_rows,
            weight.stride(0),
            width,
            **tile,
            num_warps=_WARPS,
        )
    return result


def _fits(tokens: Tensor, weight: Tensor, first: int | None = None) -> bool:
    return tokens.is_contiguous() and weight.stride(1) == 1


def _gather(tokens: Tensor, weight: Tensor) -> Tensor:
    return torch.index_select(weight, 0, tokens)


for _operation, _by_torch in ((embedding, _gather), (vocabulary_embedding, vocabulary_embedding.reference)):
    _operation.in_triton(_triton, invariant=True, supports=_fits, kernels=(embedding_kernel,))
    _operation.implement("gather", "cpu", "cuda", invariant=True)(_by_torch)
