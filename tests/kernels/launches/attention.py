"""Attention over packed keys and over pages, batch-invariant or not, sparse, divided, and of decode steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from strata.kernels.attention import batch_invariant, cuda, decode_cuda
from strata.kernels.attention.decode_triton import decode_attention_kernel
from strata.kernels.attention.prompt_keys import gather_prompt_keys
from strata.kernels.attention.query_chunks import Rows, as_query_chunks, query_chunks
from strata.kernels.attention.sparse import decodes as decodes_file
from strata.kernels.attention.sparse import prompts as prompts_file
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.choice_triton import pooled_scores_kernel
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences, SparseCall
from strata.kernels.attention.varlen_triton import attention_kernel
from strata.kernels.state.dcp_shard import ALL_KEYS, DcpShard
from strata.kernels.state.paged import PagedKV
from tests.kernels.compiled_for import CompileCase

from .noted import BF16, EPS, FP16, FP32, empty, ints, noted

KV_HEADS = 8
DECODES = ("mma.sync", "cp.async.cg")
FOLLOWS = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")


def pages(
    dtype: torch.dtype, head_dim: int, page_size: int, sequences: int, keys: int = 4096, kv_heads: int = KV_HEADS
) -> PagedKV:
    """Of sequences of so many keys at most; a pool of e4m3 or int8 has exponents."""
    pools = [(empty(64, page_size, kv_heads, head_dim, dtype=dtype),) for _ in range(2)]
    tables, lengths, slots = ints(sequences, keys // page_size), ints(sequences), ints(sequences)
    exponents: tuple[Any, Any] = ((), ())
    if dtype.itemsize == 1:
        exponents = tuple((empty(64, kv_heads, page_size, dtype=torch.uint8),) for _ in range(2))
    return PagedKV(pools[0], pools[1], tables, lengths, slots, key_exponents=exponents[0], value_exponents=exponents[1])


def call_of(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int, window: int = 0, sinks: bool = False,
    pools: torch.dtype | None = None, tokens: int = 3000, longest: int = 0,
) -> AttentionCall:  # fmt: skip
    """Of three sequences, or as many as there are tokens; page_size 0: without pages."""
    sequences = 3 if longest != 1 else tokens
    q, k, v = (empty(tokens, heads, head_dim, dtype=dtype) for heads in (KV_HEADS * group, KV_HEADS, KV_HEADS))
    held = pages(pools or dtype, head_dim, page_size, sequences) if page_size else None
    batch = Sequences(ints(sequences + 1), longest or 1000, held)
    spec = AttentionSpec(0, head_dim**-0.5, window or None)
    return AttentionCall(q, k, v, batch, spec, q.new_empty(KV_HEADS * group) if sinks else None)


def decode(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int, sequences: int, window: int | None = None,
    norm: bool | None = None, sinks: bool = False, pools: torch.dtype | None = None, ranks: int = 1,
    of_heads: bool = False, spilled: int = 0,
) -> list[CompileCase]:  # fmt: skip
    """norm: of the kernel that begins with the product, None for the one that finds all keys in the pages."""
    heads = group * KV_HEADS
    held = pages(pools or dtype, head_dim, page_size, sequences)
    if of_heads:
        held = replace(held, tables=ints(sequences, KV_HEADS, 4096 // page_size))
    product = empty(sequences, (heads + (0 if norm is None else 2 * KV_HEADS)) * head_dim, dtype=dtype)
    weight, angles = (empty(head_dim, dtype=dtype) if norm else None), empty(sequences, 1, head_dim, dtype=FP32)
    unfinished = None if norm is None else decode_cuda.Unfinished(weight, weight, EPS, angles, angles)
    of_sinks = empty(heads, dtype=dtype) if sinks else None
    out, sums = None, None
    if ranks > 1:
        out, sums = empty(sequences, heads, head_dim, dtype=FP32), empty(sequences, heads, dtype=FP32)
    spec = AttentionSpec(0, head_dim**-0.5, window)
    must = (() if dtype == FP32 else DECODES) + (() if norm is None else FOLLOWS)
    name = f"{dtype} head_dim {head_dim} group {group} page_size {page_size} window {window} sequences {sequences} "
    name += f"norm {norm} pools {pools} ranks {ranks}" + " sinks" * sinks + " tables of heads" * of_heads

    def launch() -> None:
        more = {"unfinished": unfinished, "out": out, "sinks": of_sinks, "sums": sums, "kept": DcpShard(ranks, 0)}
        decode_cuda.decode(product, heads, head_dim, held, spec, **more)

    return noted(name, launch, {decode_attention_kernel: must}, spilled)


def prompts(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int = 16, window: int = 0, bounded: bool = False,
    sinks: bool = False, pools: torch.dtype | None = None, ranks: int = 1,
) -> list[CompileCase]:  # fmt: skip
    q, k, v, batch, spec, of_sinks = call_of(dtype, group, head_dim, page_size, window, sinks, pools)
    out, sums, kept = q, None, ALL_KEYS
    if ranks > 1:
        out, sums, kept = q.float(), empty(*q.shape[:2], dtype=FP32), DcpShard(ranks, 0)
    must = () if dtype == FP32 else ("wgmma.mma_async",)
    bounds = ints(2) if bounded else None
    name = f"{dtype} head_dim {head_dim} group {group} page_size {page_size} window {window} pools {pools}"
    name += " bounded" * bounded + " sinks" * sinks + f" of {ranks} ranks" * (ranks > 1)
    # Under a cap of registers it depends on the group how much spills; what was measured spills 56 bytes.
    return noted(
        name,
        lambda: cuda.prefill(out, q, k, v, ints(3), batch, spec, bounds, of_sinks, sums, kept),
        {attention_kernel: must},
        96 if page_size and dtype != FP32 and head_dim in (64, 128) else 0,
    )


def invariant(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int = 16, window: int = 0, sinks: bool = False,
    pools: torch.dtype | None = None,
) -> list[CompileCase]:  # fmt: skip
    must = () if dtype == FP32 else ("wgmma.mma_async", "cp.async")
    name = (
        f"batch-invariant {dtype} head_dim {head_dim} group {group} page_size {page_size} window {window} pools {pools}"
    )
    found = []
    for longest in (1000, 1) if page_size else (1000,):
        call = call_of(dtype, group, head_dim, page_size, window, sinks, pools, longest=longest)
        kernels = {attention_kernel: must, batch_invariant.batch_invariant_decode_kernel: must}
        found += noted(name + " sinks" * sinks, lambda call=call: batch_invariant.attend(call), kernels)
    return found


def sparse_prompts(
    dtype: torch.dtype, group: int, head_dim: int, page_size: int = 16, sinks: bool = False, keys: int = 4096
) -> list[CompileCase]:
    q, k, v, batch, spec, of_sinks = call_of(dtype, group, head_dim, page_size, sinks=sinks)
    step = batch._replace(pages=pages(dtype, head_dim, page_size, 3, keys))
    call = SparseCall(q, k, v, step, spec, BlockChoice(0.9, 1001), of_sinks)
    must = () if dtype == FP32 else ("wgmma.mma_async",)
    name = f"of blocks {dtype} head_dim {head_dim} group {group} page_size {page_size} keys {keys}" + " sinks" * sinks
    kernels = {pooled_scores_kernel: must, attention_kernel: must}
    # As of `attention_kernel`, and some more outside of its loops.
    return noted(name, lambda: prompts_file.attend(call), kernels, 144 if head_dim in (64, 128) else 0)


def sparse_decodes() -> list[CompileCase]:
    q, k, v, batch, spec, _ = call_of(BF16, 4, 128, 16, tokens=32, longest=1)
    held = replace(pages(BF16, 128, 16, 32, 1 << 17), bounds=(empty(64, 2, KV_HEADS, 128),))
    call = SparseCall(q, k, v, batch._replace(pages=held), spec, PageChoice(128))
    return noted("of 8192 pages", lambda: decodes_file.attend(call))


def division(sequences: int, pure_prefill: bool) -> list[CompileCase]:
    rows = Rows(6144, 4096, 6144, 6144, pure_prefill=True) if pure_prefill else Rows(6144, 4096, 1024, 1024)
    divide = query_chunks.bind("cuda")
    given = ints(sequences + 1), ints(sequences), ints(2), rows
    return noted(f"of {sequences}" + ", pure prefill" * pure_prefill, lambda: divide(*given))


def gathered(kv_heads: int, head_dim: int, page_size: int) -> list[CompileCase]:
    held = pages(BF16, head_dim, page_size, 4, kv_heads=kv_heads)
    chunks = as_query_chunks(ints(8, 64), Rows(6144, 4096, 1024, 1024))
    return noted(f"{kv_heads} x {head_dim}", lambda: gather_prompt_keys(held, 0, chunks, 4096))


def compile_cases() -> list[CompileCase]:
    e4m3, int8 = torch.float8_e4m3fn, torch.int8
    return [
        *decode(BF16, 4, 128, 16, 1, norm=False),
        *decode(BF16, 2, 128, 16, 64, norm=True),
        *decode(BF16, 7, 80, 8, 8, 4096, norm=False),
        *decode(BF16, 16, 64, 1, 64, norm=True),
        *decode(BF16, 32, 256, 64, 64, norm=True),
        *decode(BF16, 4, 128, 16, 64),
        *decode(BF16, 7, 80, 16, 1, 4096),
        *decode(FP32, 4, 128, 16, 64),
        *decode(BF16, 8, 64, 16, 1, 128, norm=False, sinks=True),
        *decode(BF16, 4, 128, 16, 32, of_heads=True),
        *decode(BF16, 16, 128, 16, 8, ranks=4),
        *decode(FP16, 4, 256, 16, 1, ranks=4),
        *decode(BF16, 4, 128, 16, 64, norm=True, pools=e4m3),
        *decode(BF16, 4, 128, 16, 128, pools=int8),
        # Of one warp, whose heads are normalized before the loop: they spill once, not for each key.
        *decode(BF16, 4, 128, 16, 128, norm=True, pools=e4m3, spilled=96),
        *decode(BF16, 7, 80, 16, 8, norm=True, pools=e4m3),
        *decode(FP16, 4, 128, 16, 128, norm=True, pools=int8),
        *prompts(BF16, 4, 128),
        *prompts(BF16, 2, 128, bounded=True),
        *prompts(BF16, 4, 128, bounded=True),
        *prompts(BF16, 7, 128, window=4096),
        *prompts(BF16, 7, 64),
        *prompts(BF16, 8, 256),
        *prompts(BF16, 7, 80, 0, window=4096),
        *prompts(FP32, 4, 128),
        *prompts(BF16, 8, 64, window=128, bounded=True, sinks=True),
        *prompts(BF16, 4, 128, bounded=True, pools=e4m3),
        *prompts(BF16, 8, 128, bounded=True, ranks=2),
        *invariant(BF16, 4, 128),
        *invariant(BF16, 8, 256),
        *invariant(BF16, 7, 80, window=4096),
        *invariant(BF16, 4, 64, 0),
        *invariant(FP32, 4, 128),
        *invariant(BF16, 8, 64, window=128, sinks=True),
        *invariant(BF16, 4, 128, pools=e4m3),
        *sparse_prompts(BF16, 4, 128),
        *sparse_prompts(BF16, 7, 80, 8, keys=1 << 19),
        *sparse_prompts(BF16, 7, 64, sinks=True),
        *sparse_prompts(BF16, 16, 256, keys=1 << 20),
        *sparse_prompts(FP32, 4, 128),
        *sparse_decodes(),
        *division(32, False),
        *division(512, False),
        *division(32, True),
        *gathered(8, 128, 16),
        *gathered(3, 64, 64),
        *gathered(32, 128, 16),
    ]
