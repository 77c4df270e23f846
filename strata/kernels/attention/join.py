"""Attention over two sets of keys out of the attention over each: the log-sum-exps of their scores say how they weigh.

The merge of partial results in Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.triton_import import jit, tl

# Rows of one head that a program joins, and its warps.
_ROWS = 32
_WARPS = 4


@partial(jit, unspecialized=("rows", "one_stride", "other_stride"))
def attention_join_kernel(
    one,
    other,
    one_sums,
    other_sums,
    out,
    sums,
    rows,
    one_stride,
    other_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Programs [heads, rows / ROWS]. one, other, out [rows, heads, HEAD_DIM]; sums [heads, rows] float32."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    held = row < rows
    first = tl.load(one_sums + head * one_stride + row, mask=held, other=0.0)
    second = tl.load(other_sums + head * other_stride + row, mask=held, other=0.0)
    largest = tl.maximum(first, second)
    first = tl.exp(first - largest)
    second = tl.exp(second - largest)
    total = first + second
    column = tl.arange(0, HEAD_PAD)[None, :]
    offset = (row.to(tl.int64)[:, None] * heads + head) * HEAD_DIM + column
    within = held[:, None] & (column < HEAD_DIM)
    result = tl.load(one + offset, mask=within, other=0.0).to(tl.float32) * (first / total)[:, None]
    result += tl.load(other + offset, mask=within, other=0.0).to(tl.float32) * (second / total)[:, None]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=within)
    tl.store(sums + head * rows + row, largest + tl.log(total), mask=held)


def join(out: Tensor, one: Tensor, other: Tensor, one_sums: Tensor, other_sums: Tensor) -> Tensor:
    """Join the results of the same queries over different keys into `out`, which may be one of them.

    one, other, out: [rows, heads, head_dim], contiguous. one_sums, other_sums: [heads, rows] float32 with a last stride
    of 1, the natural logarithms of the sums of the exponentials of the scores. Returns those of all keys.
    """
    rows, heads, head_dim = out.shape
    sums = torch.empty((heads, rows), dtype=torch.float32, device=out.device)
    attention_join_kernel[(heads, ceil_div(rows, _ROWS))](
        one,
        other,
        one_sums,
        other_sums,
        out,
        sums,
        rows,
        one_sums.stride(0),
        other_sums.stride(0),
        HEAD_DIM=head_dim,
        HEAD_PAD=next_power_of_2(head_dim),
        ROWS=_ROWS,
        num_warps=_WARPS,
    )
    return sums


def compile_cases() -> list[CompileCase]:
    signature = dict.fromkeys(("one", "other", "out"), "*bf16:16") | {"sums": "*fp32:16"}
    signature |= dict.fromkeys(("one_sums", "other_sums"), "*fp32")
    signature |= dict.fromkeys(("rows", "one_stride", "other_stride"), "i32")
    return [
        CompileCase(
            f"attention_join of {head_dim}",
            attention_join_kernel,
            signature,
            {"HEAD_DIM": head_dim, "HEAD_PAD": next_power_of_2(head_dim), "ROWS": _ROWS},
            _WARPS,
            2,
        )
        for head_dim in (64, 80, 128)
    ]
