"""The latent attention of decode steps and of prompts that `strata bench kernels` times, and the write of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernels.case import EPS, Case, angles, randn
from benchmarks.kernels.cases import full_pages
from strata.hardware.roofline import Workload
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.latent.attention import latent_attention
from strata.kernels.latent.forms import Dims
from strata.kernels.state.latent_write import latent_write
from strata.models.config import ModelConfig

_DECODES = ((1, 1024), (1, 8192), (64, 1024), (64, 8192))
# Tokens of a prompt that are kept already, and those that run.
_PROMPTS = ((0, 2048), (4096, 256))
_ROWS = (1, 64, 65536)


def latent_cases(config: ModelConfig) -> Iterator[Case]:
    """At the model's sizes; of one with other attention at those that DeepSeek-V2 would give it, which has latents of
    four heads' width and rotates half of one besides."""
    dims = latent_dims(config)
    for batch, context in _DECODES:
        yield _call(dims, (1,) * batch, (context,) * batch, f"decode {dims.heads}x{dims.rank} over {context}")
    for kept, new in _PROMPTS:
        past = f" after {kept}" if kept else ""
        yield _call(dims, (new,), (kept + new,), f"prefill {dims.heads}x{dims.rank}{past}")
    for rows in _ROWS:
        yield _write(dims, rows)


def latent_dims(config: ModelConfig) -> Dims:
    latent, dim = config.latent, config.head_dim
    if latent is None:
        return Dims(config.num_heads, dim, dim // 2, 4 * dim, dim)
    return Dims(config.num_heads, latent.nope, latent.rope, latent.rank, latent.value)


def _call(dims: Dims, new: tuple[int, ...], total: tuple[int, ...], shape: str) -> Case:
    width, tokens = dims.rank + dims.rope, sum(new)

    def make() -> tuple[Any, ...]:
        pages = full_pages(1, width, total)
        offsets = torch.tensor([0, *new]).cumsum(0).int()
        # What was written: the whole of a sequence that begins, else nothing reads it.
        row = randn(tokens, width)
        if new == total:
            row = pages.keys[0][pages.tables[0].long()].flatten(0, 2)[:tokens]
        weight = randn(dims.heads * (dims.nope + dims.value), dims.rank) * dims.rank**-0.5
        q = randn(tokens, dims.heads, dims.nope + dims.rope)
        if max(new) > 1:
            starts, bounds = offsets[:-1], torch.tensor([0, len(new)], dtype=torch.int32)
            parts = BatchSplit(torch.zeros_like(pages.lengths), starts, bounds, 0, begin=new == total)
            pages = replace(pages, parts=parts)
        return q, row, weight, Sequences(offsets, max(new), pages), AttentionSpec(0, (dims.nope + dims.rope) ** -0.5)

    return Case(latent_attention, shape, len(new), make, Workload(new, total), "bfloat16")


def _write(dims: Dims, rows: int) -> Case:
    width = dims.rank + dims.rope

    def make() -> tuple[Any, ...]:
        pages = full_pages(1, width, (rows,))
        pages = replace(pages, slot_mapping=pages.slot_mapping[:rows])
        return randn(rows, width), randn(dims.rank), EPS, *angles(rows, dims.rope), pages, 0, True

    return Case(latent_write, f"{dims.rank}+{dims.rope}", rows, make, Workload((1,) * rows, (1,) * rows))
