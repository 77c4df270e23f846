"""What a rank computes that keeps a part of the keys, for `strata bench kernels`: of one of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.case import Case, case_of, randn
from benchmarks.kernels.cases import ROWS, full_pages
from benchmarks.kernels.latent_cases import latent_dims
from strata.hardware.roofline import Workload
from strata.kernels.attention.dcp.dcp import dcp_attention
from strata.kernels.attention.dcp.gathered import dcp_rows, gathered_attention
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.latent.dcp import (
    absorb_queries,
    dcp_latent_attention,
    expand_values,
    gathered_latent_attention,
)
from strata.kernels.latent.forms import Dims
from strata.kernels.op import Operation
from strata.kernels.state.dcp_shard import DcpShard
from strata.models.config import ModelConfig

_KEPT = DcpShard(ranks=2, rank=0)
_DECODES = ((1, 1024), (1, 32768), (64, 8192))
# Tokens of a prompt that are cached, and those that run.
_PROMPTS = ((960, 64), (63488, 2048))


def divided_cases(config: ModelConfig) -> Iterator[Case]:
    """Decodes, prompts whose keys are gathered, and what gathers them; of latents, too, or alone, as `latent_cases`."""
    if config.latent is None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        yield from _attention_cases(heads, kv_heads, dim)
    dims = latent_dims(config)
    yield from _latent_cases(dims)
    for rows in ROWS:
        yield from _products(dims, rows)


def _attention_cases(heads: int, kv_heads: int, dim: int) -> Iterator[Case]:
    shape, spec = f"{heads}/{kv_heads}x{dim}", AttentionSpec(0, dim**-0.5)

    def given(new: tuple[int, ...], total: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Sequences]:
        tokens = sum(new)
        q, k, v = randn(tokens, heads, dim), randn(tokens, kv_heads, dim), randn(tokens, kv_heads, dim)
        return q, k, v, _step(kv_heads, dim, new, total)

    for new, total, name in _steps():

        def decode(new: tuple[int, ...] = new, total: tuple[int, ...] = total) -> tuple[Any, ...]:
            return *given(new, total), spec, _KEPT

        def prompt(new: tuple[int, ...] = new, total: tuple[int, ...] = total) -> tuple[Any, ...]:
            q, k, v, step = given(new, total)
            return q, k, v, step, spec, dcp_rows.reference(k, step, spec, _KEPT, 2).repeat(2, 1, 1, 1, 1), _KEPT

        def rows(new: tuple[int, ...] = new, total: tuple[int, ...] = total) -> tuple[Any, ...]:
            _, k, _, step = given(new, total)
            return k, step, spec, _KEPT, 2

        if max(new) == 1:
            yield _case(dcp_attention, f"decode {shape}{name}", new, total, decode)
        else:
            yield _case(gathered_attention, f"prefill {shape}{name}", new, total, prompt)
            yield _case(dcp_rows, f"{kv_heads}x{dim}{name}", new, total, rows)


def _latent_cases(dims: Dims) -> Iterator[Case]:
    shape, spec = f"{dims.heads}x{dims.rank}", AttentionSpec(0, (dims.nope + dims.rope) ** -0.5)
    width = dims.rank + dims.rope

    for new, total, name in _steps():

        def decode(new: tuple[int, ...] = new, total: tuple[int, ...] = total) -> tuple[Any, ...]:
            q, row = randn(sum(new), dims.heads, width), randn(sum(new), width)
            return q, row, _step(1, width, new, total), spec, _KEPT, dims.rank

        def prompt(new: tuple[int, ...] = new, total: tuple[int, ...] = total) -> tuple[Any, ...]:
            q, row = randn(sum(new), dims.heads, dims.nope + dims.rope), randn(sum(new), width)
            step = _step(1, width, new, total)
            gathered = dcp_rows.reference(row, step, spec, _KEPT, 1).repeat(2, 1, 1, 1, 1)
            return q, row, _weight(dims), step, spec, gathered, _KEPT

        if max(new) == 1:
            yield _case(dcp_latent_attention, f"decode {shape}{name}", new, total, decode)
        else:
            yield _case(gathered_latent_attention, f"prefill {shape}{name}", new, total, prompt)


def _products(dims: Dims, rows: int) -> Iterator[Case]:
    def queries() -> tuple[Any, ...]:
        return randn(rows, dims.heads, dims.nope + dims.rope), _weight(dims), dims.value

    def averages() -> tuple[Any, ...]:
        return randn(rows, dims.heads, dims.rank), _weight(dims), dims.value

    for operation, make in ((absorb_queries, queries), (expand_values, averages)):
        yield replace(case_of(operation, f"{dims.heads}x{dims.rank}", rows, make), dtype="bfloat16")


def _weight(dims: Dims) -> Tensor:
    return randn(dims.heads * (dims.nope + dims.value), dims.rank).mul_(dims.rank**-0.5)


def _steps() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], str]]:
    for batch, context in _DECODES:
        yield (1,) * batch, (context,) * batch, f" over {context}"
    for cached, new in _PROMPTS:
        yield (new,), (cached + new,), f" after {cached}"


def _step(kv_heads: int, dim: int, new: tuple[int, ...], total: tuple[int, ...]) -> Sequences:
    """Pages of what is kept here; lengths are those of whole sequences."""
    pages = full_pages(kv_heads, dim, tuple(_KEPT.count(length) for length in total))
    lengths = torch.tensor(total, dtype=torch.int32)
    return Sequences(torch.tensor([0, *new]).cumsum(0).int(), max(new), replace(pages, lengths=lengths))


def _case(operation: Operation, shape: str, new: tuple[int, ...], total: tuple[int, ...], make: Any) -> Case:
    return Case(operation, shape, sum(new), make, Workload(new, total), "bfloat16")
