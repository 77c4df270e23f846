"""The attention of decode steps and of prompts that `strata bench kernels` times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.kernels.case import EPS, Case, angles, randn
from benchmarks.kernels.cases import PAGE_SIZE, full_pages, head_weights
from benchmarks.kernels.dcp_cases import divided_cases
from benchmarks.kernels.latent_cases import latent_cases
from strata.hardware.roofline import Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.cudnn_prompts import why_no_plan
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.query_chunks import Rows, as_query_chunks, query_chunks
from strata.kernels.attention.spec import AttentionSpec, HeadsSpec, Sequences
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.models.config import ModelConfig

BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (640, 1024, 4096)
# Tokens of a prompt that are cached, and those that run.
PROMPTS = ((0, 2048), (0, 8192), (4096, 4096))


def attention_cases(config: ModelConfig) -> Iterator[Case]:
    """Decode at every batch and context, each prompt, and decode with sinks at the longest context; latent attention,
    too, or alone where the model has it, and both where ranks divide the keys."""
    if config.latent is None:
        for context in CONTEXTS:
            for batch in BATCHES:
                yield _decode(config, batch, context)
                yield _decode_from_product(config, batch, context)
        for cached, new in PROMPTS:
            yield _prefill(config, cached, new)
        for batch in (1, 64):
            yield _decode(config, batch, CONTEXTS[-1], has_sinks=True)
    yield from latent_cases(config)
    yield from divided_cases(config)


def _decode(config: ModelConfig, batch: int, context: int, *, has_sinks: bool = False) -> Case:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def make() -> tuple[Any, ...]:
        q, k, v = (randn(batch, heads, dim), randn(batch, kv_heads, dim), randn(batch, kv_heads, dim))
        pages, sinks = _decode_pages(config, batch, context), (randn(heads),) if has_sinks else ()
        return q, *kv_write(k, v, pages, 0), Sequences(_offsets(batch), 1, pages), AttentionSpec(0, dim**-0.5), *sinks

    shape = f"decode {heads}/{kv_heads}x{dim} over {context}" + " with sinks" * has_sinks
    workload = Workload((1,) * batch, (context,) * batch)
    return Case(attention, shape, batch, make, workload, "bfloat16", () if has_sinks else LIBRARIES)


def _decode_from_product(config: ModelConfig, batch: int, context: int) -> Case:
    """As the engine runs it: norms, rotation and the write into the pages are part of it."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def make() -> tuple[Any, ...]:
        product = randn(batch, (heads + 2 * kv_heads) * dim)
        step = Sequences(_offsets(batch), 1, _decode_pages(config, batch, context))
        specs = HeadsSpec(0, heads, kv_heads, EPS), AttentionSpec(0, dim**-0.5)
        return product, *head_weights(config), *angles(batch, dim), step, *specs

    shape = f"{heads}+2*{kv_heads}x{dim} over {context}"
    return Case(decode_attention, shape, batch, make, Workload((1,) * batch, (context,) * batch), "bfloat16")


def _offsets(batch: int) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32)


def _decode_pages(config: ModelConfig, batch: int, context: int) -> PagedKV:
    """The newest token of each sequence has the last place of its last page."""
    pages = full_pages(config.num_kv_heads, config.head_dim, (context,) * batch)
    return replace(pages, slot_mapping=pages.tables[:, -1] * pages.page_size + pages.page_size - 1)


def _prefill(config: ModelConfig, cached: int, new: int) -> Case:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def make() -> tuple[Any, ...]:
        q, k, v = randn(new, heads, dim), randn(new, kv_heads, dim), randn(new, kv_heads, dim)
        offsets = torch.tensor([0, new], dtype=torch.int32)
        pages = full_pages(kv_heads, dim, (cached + new,))
        pages = replace(pages, slot_mapping=pages.slot_mapping[cached:], parts=_parts(q, offsets, pages))
        return q, *kv_write(k, v, pages, 0), Sequences(offsets, new, pages), AttentionSpec(0, dim**-0.5)

    past = f" after {cached}" if cached else ""
    shape = f"prefill {heads}/{kv_heads}x{dim}{past}"
    return Case(attention, shape, new, make, Workload((new,), (cached + new,)), "bfloat16", LIBRARIES)


def _parts(q: Tensor, offsets: Tensor, pages: PagedKV) -> BatchSplit:
    """One prompt, divided for cuDNN where the engine would."""
    bounds, chunks = torch.tensor([0, 1], dtype=torch.int32), None
    if q.is_cuda and why_no_plan(DeviceLimits.of(q.device), q.dtype, q.shape[2], PAGE_SIZE) is None:
        row = pages.keys[0].stride(1)
        rows = Rows(q.stride(0), q.stride(0), row, row)
        division = query_chunks(offsets, pages.lengths, bounds, rows)
        chunks = as_query_chunks(division, rows)
    return BatchSplit(torch.zeros_like(pages.lengths), offsets[:1], bounds, 0, chunks)


def _dense(q: Tensor, k: Tensor, v: Tensor, step: Sequences, spec: AttentionSpec) -> Tensor:
    """Sequences of one length over keys one after the other, as torch wants them: it is spared the way by the pages."""
    assert step.pages is not None
    sequences = step.pages.tables.shape[0]
    keys, values = (
        pool[spec.layer].flatten(0, 1).unflatten(0, (sequences, -1)).transpose(1, 2)
        for pool in (step.pages.keys, step.pages.values)
    )
    queries = q.unflatten(0, (sequences, -1)).transpose(1, 2)
    # The one query of a decoding sequence sees all keys.
    mask = None if queries.shape[2] == 1 else causal_lower_right(queries.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


def _flash(*args: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _dense(*args)


def _cudnn(*args: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _dense(*args)


LIBRARIES = (_flash, _cudnn)
