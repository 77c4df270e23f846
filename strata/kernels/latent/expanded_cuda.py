"""Latent attention over pages on CUDA in steps with prompts: those that begin in the step, which stand whole in it,
attend to keys and values of each head, made by one product of the step's rows.

The others, decodes and prompts with tokens from before, are absorbed. In a captured step only the device knows which
are which, so both forms are launched for any batch of its size: the kernel of each leaves the other's sequences as they
are.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.attention.spec import AttentionBatch, AttentionSpec
from strata.kernels.attention.varlen_triton import Tile
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.latent import cuda as latent_cuda
from strata.kernels.latent.cuda import LatentStep, in_latents
from strata.kernels.latent.expanded_triton import expanded_constants, expanded_prompt_kernel, expanded_tile
from strata.kernels.latent.forms import Dims, LatentCall
from strata.kernels.op import CUBLAS
from strata.kernels.state.paged import PagedKV


def supports(call: LatentCall) -> bool:
    """The heads for which the kernel's tiles were chosen, DeepSeek's."""
    q, row, dims = call.q, call.row, call.dims
    return (
        latent_cuda.supports(call)
        and LatentStep.of(q, call.batch).starts is not None
        and (dims.nope, dims.rope, dims.value) == (128, 64, 128)
        and q.dtype in (torch.bfloat16, torch.float16)
        and row.stride(-1) == 1
    )


def kernels(call: LatentCall) -> tuple[Any, ...]:
    split = LatentStep.of(call.q, call.batch)
    found = split.kernels(prompts=not split.begin)
    return (*((CUBLAS, *found, CUBLAS) if found else ()), CUBLAS, expanded_prompt_kernel)


def scratch(call: LatentCall) -> int:
    """One after the other: what absorbed sequences need, and the keys and values of all heads."""
    q, dims, split = call.q, call.dims, LatentStep.of(call.q, call.batch)
    tokens = split.decodes if split.begin else q.shape[0]
    queries = 2 * tokens * dims.heads * dims.rank * q.element_size()
    splits = latent_cuda.splits_bytes(split.decodes, q, call.pages, dims.rank)
    return max(queries + splits, q.shape[0] * call.weight.shape[0] * q.element_size())


def attend(call: LatentCall) -> Tensor:
    """What is absorbed comes first, and may leave anything in the rows of prompts that begin: these come last."""
    q, row, weight, batch, spec = call
    dims, pages, split = call.dims, call.pages, LatentStep.of(q, batch)
    result = torch.empty((q.shape[0], dims.heads, dims.value), dtype=q.dtype, device=q.device)
    _absorbed(result[: split.decodes] if split.begin else result, call, split)
    made = F.linear(row[:, : dims.rank], weight)
    starts = batch.offsets if split.starts is None else split.starts
    expanded_prompts(result, q, made, row, batch, pages, spec, dims, starts, split.bounds)
    return result


def _absorbed(result: Tensor, call: LatentCall, split: LatentStep) -> None:
    """Decodes and prompts with tokens from before the step, into result [tokens, heads, value] of the first rows."""
    if not len(result):
        return
    mixed, values = in_latents(call.q[: len(result)], call, split, continued=True)
    torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2), out=result.transpose(0, 1))


def expanded_prompts(
    out: Tensor,
    q: Tensor,
    made: Tensor,
    row: Tensor,
    batch: AttentionBatch,
    pages: PagedKV,
    spec: AttentionSpec,
    dims: Dims,
    starts: Tensor,
    bounds: Tensor | None,
    tile: Tile | None = None,
) -> None:
    """Of sequences all of whose tokens are in the batch, the results into their rows of out [tokens, heads, value]; of
    those with length 0 zeros. The other rows stay as they are.

    made: [tokens, heads * (nope + value)], keys and values of each head of the batch's rows. starts, bounds: as for
    `latent_cuda.prompts`. tile: None: that of the rule.
    """
    tokens, sequences = q.shape[0], batch.offsets.shape[0] - 1
    if tokens == 0:
        return
    tile = tile or expanded_tile(q.dtype)
    # Before Hopper operands of products take registers too: under a cap hundreds of bytes would spill.
    capped = DeviceLimits.of(q.device).capability >= (9, 0) if tile.registers else False
    expanded_prompt_kernel[(dims.heads, tokens // tile.rows + sequences)](
        *(q, made, row, out, starts, batch.offsets, bounds, pages.lengths),
        *(sequences, spec.scale * log2(e), dims.rank),
        *(*q.stride()[:2], made.stride(0), row.stride(0), *out.stride()[:2]),
        **expanded_constants(dims),
        **tile.options,
        maxnreg=tile.registers if capped else None,
    )
