"""Messages of ranks through symmetric memory that is not there, and what is computed around them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from strata.comm.all_reduce_cuda import (
    flag_norm,
    gemm_all_reduce_norm,
    one_shot,
    one_shot_gather,
    one_shot_norm,
    two_shot,
)
from strata.comm.experts.rows import scatter_sums
from strata.comm.symmetric import imagined
from strata.kernels.collective.all_reduce import (
    gather_rows_kernel,
    one_shot_kernel,
    one_shot_norm_kernel,
    two_shot_kernel,
)
from strata.kernels.collective.gemm_all_reduce import one_shot_received_norm_kernel
from strata.kernels.collective.joined_heads import pack_heads, unpack_heads
from strata.kernels.collective.one_shot_flags import flag_norm_kernel
from strata.kernels.collective.quantized_shards import dequantize_shards, quantize_shards, sum_shards
from tests.kernels.compiled_for import CompileCase

from .noted import BF16, EPS, FP16, FP32, empty, noted

PACKETS = ("ld.volatile.global.v2.b64", "st.global.v2.b64", "griddepcontrol.wait")
FLAGS = ("atom.global.sys.release", "ld.acquire.sys.global")
MUST = {
    one_shot_kernel: PACKETS,
    one_shot_norm_kernel: PACKETS,
    two_shot_kernel: FLAGS,
    flag_norm_kernel: (*FLAGS, "st.global.v4.b32", "griddepcontrol.wait"),
    gather_rows_kernel: PACKETS,
    one_shot_received_norm_kernel: (PACKETS[0], "griddepcontrol.launch_dependents", "griddepcontrol.wait"),
}


def of_ranks(name: str, run: Any, dtype: torch.dtype, ranks: int, spilled: int = 0) -> list[CompileCase]:
    return noted(f"{name}, {dtype}, {ranks} ranks", run, MUST, spilled)


def compile_cases() -> Iterator[CompileCase]:
    for dtype, ranks in ((BF16, 2), (FP32, 2), (FP16, 4), (BF16, 8)):
        axis = imagined("ranks", ranks)
        numbers = 4 // dtype.itemsize  # of a word
        for words in (1 << 16, 1 << 18):
            x = empty(words * numbers, dtype=dtype)
            for name, run in (
                ("of", one_shot),
                ("of", two_shot),
                ("to each rank of", scatter_sums),
                ("of", partial(one_shot_gather, dim=0)),
            ):
                yield from of_ranks(f"{name} {words} words", partial(run, x, axis), dtype, ranks)
        for words in (512, 2048, 4096):
            rows, weight = empty(64, words * numbers, dtype=dtype), empty(words * numbers, dtype=dtype)
            for spilled, run in (
                (8 * ((dtype, words) == (FP32, 4096)), one_shot_norm),
                (8 * ((dtype, words) == (FP16, 2048)), flag_norm),
            ):
                if run is one_shot_norm or ranks < 8:
                    name = f"of rows of {words} words"
                    yield from of_ranks(name, partial(run, rows, axis, rows, weight, EPS), dtype, ranks, spilled)
            if dtype != FP32:
                few, x, by = (empty(*size, dtype=dtype) for size in ((8, 2 * words), (8, 2048), (2 * words, 2048)))
                sent = partial(gemm_all_reduce_norm, x, axis, by, few, weight, EPS)
                yield from (
                    case
                    for case in of_ranks(f"of rows of {words} words", sent, dtype, ranks)
                    if case.kernel is one_shot_received_norm_kernel
                )
    # Keys of draws: words of a row are no multiple of 16.
    keys = empty(33, 1, dtype=torch.int64)
    must = {gather_rows_kernel: ("ld.volatile.global.b64", "st.global.b64", "griddepcontrol.wait")}
    yield from noted("of keys", partial(one_shot_gather, keys, imagined("ranks", 2), 1), must)
    for own, dim, ranks in ((8, 128, 2), (3, 80, 5), (16, 512, 8)):
        tokens, heads = 1000, own * ranks
        mixed, sums = empty(tokens, heads, dim, dtype=FP32), empty(tokens, heads, dtype=FP32)
        name = f"{own} heads of {dim}, {ranks} ranks"
        yield from noted(name, partial(pack_heads, mixed, sums, ranks))
        yield from noted(name, partial(unpack_heads, empty(ranks, tokens, own * (dim + 1), dtype=FP32), dim, BF16))
    for ranks in (2, 8):
        yield from noted(f"{ranks} ranks", partial(rounded_sum, empty(1000, 4096), ranks))


def rounded_sum(x: torch.Tensor, ranks: int) -> None:
    parts = quantize_shards.bind("cuda")(x, ranks)
    width = x.shape[1] // ranks
    total = sum_shards.bind("cuda")(parts, width)
    dequantize_shards.bind("cuda")(total, width, x.dtype)
