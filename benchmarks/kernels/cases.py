"""The calls of one step of a model that `strata bench kernels` times besides its products and its attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import BF16_BYTES, EPS, FP32_BYTES, Case, Scalable, angles, case_of, randn
from benchmarks.kernels.family_cases import family_cases
from benchmarks.kernels.message_cases import message_cases
from benchmarks.kernels.recurrent_cases import recurrent_cases
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.linear.embedding import embedding
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.norm.norm import add_rms_norm, rms_norm
from strata.kernels.rotary.rope import rope, rope_angles
from strata.kernels.sampling.filters import WORD, apply_bitmask, filter_bounds
from strata.kernels.sampling.sampling import gumbel_sample, token_logprobs
from strata.kernels.sampling.shards import best_in_shard, exponential_sums
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from strata.models.config import ModelConfig

ROWS = (1, 64, 8192)
SAMPLED_ROWS = (1, 64, 512)
PROMPT_ROWS = (2048, 8192)
PAGE_SIZE = 16
# What a call has to move before it says how near its kernel comes to the memory bandwidth.
LARGE_BYTES = 64_000_000


def full_pages(kv_heads: int, dim: int, lengths: tuple[int, ...]) -> PagedKV:
    """Full pools of one layer, the pages of each sequence scattered; one slot for each token of the first sequence."""
    most = max(-(-length // PAGE_SIZE) for length in lengths)
    tables = torch.randperm(len(lengths) * most).int().view(len(lengths), most)
    keys, values = (randn(tables.numel(), PAGE_SIZE, kv_heads, dim) for _ in range(2))
    slots = (tables[0, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[: lengths[0]].int()
    return PagedKV((keys,), (values,), tables, torch.tensor(lengths, dtype=torch.int32), slots)


def head_weights(config: ModelConfig) -> tuple[Tensor | None, Tensor | None]:
    """Of the norms of queries and keys, in the family that has them."""
    if not config.architecture.startswith("Qwen3"):
        return None, None
    return randn(config.head_dim), randn(config.head_dim)


def rows_beyond(row_bytes: int) -> int:
    """The least power of two, from 8192 on, with which a call moves more than `LARGE_BYTES`."""
    rows = ROWS[-1]
    while rows * row_bytes <= LARGE_BYTES:
        rows *= 2
    return rows


def cases(config: ModelConfig) -> Iterator[Case]:
    """The cases of a model: each operation at `ROWS` and, if those move less than `LARGE_BYTES`, at more."""
    for kind in (_norms, _rotation, _heads_to_pages, _activation, _kv_writes, _lookup, family_cases, message_cases):
        for made, row_bytes in kind(config):
            for rows in sorted({*ROWS, rows_beyond(row_bytes)}):
                yield made(rows)
    for rows in SAMPLED_ROWS:
        yield from _sampling(config.vocab_size, rows)
    yield from recurrent_cases(config)
    for rows in PROMPT_ROWS:
        yield _gated_product(config, rows)


def _norms(config: ModelConfig) -> Iterator[Scalable]:
    hidden = config.hidden_size

    def norm(rows: int) -> Case:
        def library(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return F.rms_norm(x, weight.shape, weight, eps)

        return case_of(rms_norm, f"{hidden}", rows, lambda: (randn(rows, hidden), randn(hidden), EPS), library)

    def sum_and_norm(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            return randn(rows, hidden), randn(rows, hidden), randn(hidden), EPS

        return case_of(add_rms_norm, f"{hidden}", rows, make)

    yield norm, 2 * hidden * BF16_BYTES
    yield sum_and_norm, 4 * hidden * BF16_BYTES


def _rotation(config: ModelConfig) -> Iterator[Scalable]:
    heads, dim = config.num_heads, config.head_dim
    product = (heads + 2 * config.num_kv_heads) * dim

    def look_up(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            positions = torch.randperm(config.max_length).repeat(-(-rows // config.max_length))
            return positions[:rows].int(), torch.randn(config.max_length, dim)

        return case_of(rope_angles, f"{config.max_length}x{dim}", rows, make)

    def rotate(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            return randn(rows, product)[:, : heads * dim].unflatten(-1, (-1, dim)), *angles(rows, dim)

        return case_of(rope, f"{heads}x{dim}", rows, make)

    yield look_up, 3 * dim * FP32_BYTES
    yield rotate, 2 * heads * dim * BF16_BYTES + dim * FP32_BYTES


def _heads_to_pages(config: ModelConfig) -> Iterator[Scalable]:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    product = (heads + 2 * kv_heads) * dim

    def case(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            pages = full_pages(kv_heads, dim, (rows,))
            spec = HeadsSpec(0, heads, kv_heads, EPS)
            return randn(rows, product), *head_weights(config), *angles(rows, dim), pages, spec

        return case_of(qk_rope_kv_write, f"{heads}+2*{kv_heads}x{dim}", rows, make)

    yield case, 2 * product * BF16_BYTES + dim * FP32_BYTES


def _activation(config: ModelConfig) -> Iterator[Scalable]:
    inner = config.intermediate_size

    def case(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            return tuple(randn(rows, 2 * inner).chunk(2, -1))

        return case_of(silu_mul, f"{inner}", rows, make, lambda gate, up: F.silu(gate) * up)

    yield case, 3 * inner * BF16_BYTES


def _gated_product(config: ModelConfig, rows: int) -> Case:
    hidden, inner = config.hidden_size, config.intermediate_size

    def make() -> tuple[Any, ...]:
        return randn(rows, hidden), randn(2 * inner, hidden)

    def library(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    case = case_of(linear_silu_mul, f"gate_up {hidden}->2*{inner}", rows, make, library)
    return replace(case, dtype="bfloat16")


def _kv_writes(config: ModelConfig) -> Iterator[Scalable]:
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    product = (heads + 2 * kv_heads) * dim

    def case(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            k, v = randn(rows, product)[:, heads * dim :].unflatten(-1, (-1, dim)).chunk(2, 1)
            return k, v, full_pages(kv_heads, dim, (rows,)), 0

        return case_of(kv_write, f"{kv_heads}x{dim}", rows, make)

    yield case, 4 * kv_heads * dim * BF16_BYTES


def _lookup(config: ModelConfig) -> Iterator[Scalable]:
    vocab, hidden = config.vocab_size, config.hidden_size

    def case(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            return torch.randperm(vocab)[:rows].int(), randn(vocab, hidden)

        return case_of(embedding, f"{vocab}x{hidden}", rows, make, F.embedding)

    yield case, 2 * hidden * BF16_BYTES


def _sampling(vocab: int, rows: int) -> Iterator[Case]:
    def drawing() -> tuple[Any, ...]:
        seeds = torch.arange(rows)
        steps = torch.randint(100, (rows,), dtype=torch.int32)
        return randn(rows, vocab), torch.ones(rows), seeds, steps

    def filtering() -> tuple[Any, ...]:
        ones = torch.ones(rows)
        return randn(rows, vocab) * 4, ones, (50 * ones).int(), 0.9 * ones, 0 * ones

    def chosen() -> tuple[Any, ...]:
        return torch.randn(rows, vocab), torch.randint(vocab, (rows, 2))

    def masking() -> tuple[Any, ...]:
        masks = torch.randint(-(2**31), 2**31, (rows, -(-vocab // WORD)), dtype=torch.int32)
        return randn(rows, vocab), masks, torch.arange(rows, dtype=torch.int32)

    yield case_of(apply_bitmask, f"{vocab}", rows, masking, apply_bitmask.reference)
    yield case_of(gumbel_sample, f"{vocab}", rows, drawing, gumbel_sample.reference)
    yield case_of(filter_bounds, f"{vocab}", rows, filtering, filter_bounds.reference)
    yield case_of(token_logprobs, f"{vocab}", rows, chosen, token_logprobs.reference)
    # What a rank does that holds so many ids.
    yield case_of(best_in_shard, f"{vocab}", rows, lambda: (*drawing(), vocab), best_in_shard.reference)
    yield case_of(exponential_sums, f"{vocab}", rows, lambda: chosen()[:1], exponential_sums.reference)
