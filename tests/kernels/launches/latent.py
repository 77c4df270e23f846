"""Latent attention: absorbed and expanded prompts, decodes, batch-invariant, and where ranks divide the rows."""

from __future__ import annotations

import torch

from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.latent import cuda, expanded_cuda
from strata.kernels.latent.expanded_triton import expanded_prompt_kernel
from strata.kernels.latent.forms import DcpLatentCall, LatentCall
from strata.kernels.latent.kernels_triton import latent_decode_kernel, latent_prompt_kernel
from strata.kernels.state.dcp_shard import DcpShard
from strata.kernels.state.paged import PagedKV
from tests.kernels.compiled_for import CompileCase

from .noted import BF16, FP32, empty, ints, noted

NOPE, ROPE, RANK, VALUE = 128, 64, 512, 128
SPEC = AttentionSpec(0, 0.07)


def batch_of(tokens: int, longest: int, dtype: torch.dtype, parts: bool) -> Sequences:
    """Of as many sequences as there are tokens, or of three."""
    sequences = tokens if longest == 1 else 3
    pool = (empty(64, 16, 1, RANK + ROPE, dtype=dtype),)
    known = BatchSplit(ints(sequences), ints(sequences), ints(2)) if parts else None
    return Sequences(
        ints(sequences + 1),
        longest,
        PagedKV(pool, pool, ints(sequences, 512), ints(sequences), ints(tokens), parts=known),
    )


def latent(
    dtype: torch.dtype, heads: int, tokens: int, longest: int = 1000, parts: bool = False, run: str = "attend"
) -> list[CompileCase]:
    q, row = empty(tokens, heads, NOPE + ROPE, dtype=dtype), empty(tokens, RANK + ROPE, dtype=dtype)
    weight = empty(heads * (NOPE + VALUE), RANK, dtype=dtype)
    call = LatentCall(q, row, weight, batch_of(tokens, longest, dtype, parts), SPEC)
    attend = {"attend": cuda.attend, "fixed": cuda.attend_batch_invariant, "expanded": expanded_cuda.attend}[run]
    must = {} if dtype == FP32 else {latent_prompt_kernel: ("mma",), latent_decode_kernel: ("mma",)}
    must[expanded_prompt_kernel] = ("wgmma.mma_async",)
    name = f"{dtype} {heads} heads {tokens} tokens {run}" + " in parts" * parts
    return noted(name, lambda: attend(call), must)


def divided(heads: int, longest: int) -> list[CompileCase]:
    q, row = empty(64, heads, RANK + ROPE), empty(64, RANK + ROPE)
    call = DcpLatentCall(q, row, batch_of(64, longest, BF16, longest > 1), SPEC, DcpShard(8, 0), RANK)
    must = {latent_prompt_kernel: ("mma",), latent_decode_kernel: ("mma",)}
    return noted(f"{heads} heads of 8 ranks, longest {longest}", lambda: cuda.attend_dcp(call), must)


def compile_cases() -> list[CompileCase]:
    return [
        *latent(BF16, 16, 3000),
        *latent(BF16, 128, 64, parts=True),
        *latent(FP32, 16, 3000, run="fixed"),
        *latent(BF16, 16, 3000, run="fixed"),
        *latent(BF16, 16, 1, 1),
        *latent(BF16, 16, 64, 1),
        *latent(BF16, 128, 64, 1),
        *latent(FP32, 16, 64, 1),
        *latent(BF16, 16, 3000, run="expanded"),
        *latent(BF16, 16, 3000, parts=True, run="expanded"),
        *divided(128, 1),
        *divided(128, 20),
    ]
