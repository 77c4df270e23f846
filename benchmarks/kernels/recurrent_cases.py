"""The calls of recurrent layers, as wide as Mamba-2 makes them for the hidden size of the model that is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.case import EPS, Case, randn
from strata.hardware.roofline import Workload
from strata.kernels.recurrent.deinterleave import deinterleave
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.recurrent.gated_norm import gated_mean_square, gated_rms_norm, sharded_gated_rms_norm
from strata.kernels.recurrent.sequences import StateSpaceSpec
from strata.kernels.recurrent.short_convolution import short_convolution
from strata.kernels.recurrent.state_space import state_space
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch
from strata.models.config import ModelConfig

# Sequences of a token each, behind so many others; and tokens of a prompt.
_SEQUENCES, _BEHIND, _PROMPTS = (1, 64, 512), 8, (2048, 8192)
_HEAD, _STATE, _WIDTH = 64, 128, 4


def recurrent_cases(config: ModelConfig) -> Iterator[Case]:
    """Mamba-2's operations: single tokens of many sequences, whose states are the bytes, and prompts."""
    inner = 2 * config.hidden_size
    heads, channels = max(1, inner // _HEAD), inner + 2 * _STATE
    for new in ((1,) * count for count in _SEQUENCES):
        yield from _layer(inner, heads, channels, new, tuple(one + _BEHIND for one in new))
    for length in _PROMPTS:
        yield from _layer(inner, heads, channels, (length,), (length,))


def _layer(inner: int, heads: int, channels: int, new: tuple[int, ...], total: tuple[int, ...]) -> Iterator[Case]:
    workload, rows = Workload(new, total), sum(new)

    def convolution() -> tuple[Any, ...]:
        batch = _batch(workload, (channels, _WIDTH - 1), torch.bfloat16)
        return randn(rows, channels), randn(channels, 1, _WIDTH), randn(channels), batch, 0, True

    def scan() -> tuple[Any, ...]:
        batch = _batch(workload, (heads, _HEAD, _STATE), torch.float32)
        given = randn(rows, heads, _HEAD), randn(rows, heads), randn(rows, 1, _STATE), randn(rows, 1, _STATE)
        spec = StateSpaceSpec(0, 0.0, math.inf)
        return *given, randn(heads), randn(heads), randn(heads), batch, spec

    # As many values as Mamba-2 has, and half as many key heads, as Qwen3-Next has them.
    pairs = max(1, inner // _STATE // 2)

    def delta() -> tuple[Any, ...]:
        batch = _batch(workload, (2 * pairs, _STATE, _STATE), torch.float32)
        given = randn(rows, pairs, _STATE), randn(rows, pairs, _STATE), randn(rows, 2 * pairs, _STATE)
        gates = randn(rows, 2 * pairs), randn(rows, 2 * pairs), randn(2 * pairs), randn(2 * pairs)
        return *given, *gates, batch, 0

    def columns() -> tuple[Any, ...]:
        return randn(rows, pairs, 6 * _STATE), (_STATE, _STATE, 2 * _STATE, 2 * _STATE)

    def norm() -> tuple[Any, ...]:
        return randn(rows, inner), randn(rows, inner), randn(inner), EPS, inner, True

    def divided() -> tuple[Any, ...]:
        x, gate = randn(rows, inner), randn(rows, inner)
        return x, gate, 2 * gated_mean_square.reference(x, gate), 2, randn(inner), EPS

    kind = "prompt" if len(new) == 1 and rows > 1 else "decode"
    yield Case(short_convolution, f"{kind} {channels} by {_WIDTH}", rows, convolution, workload)
    yield Case(state_space, f"{kind} {heads}x{_HEAD} by {_STATE}", rows, scan, workload)
    products = "bfloat16" if kind == "prompt" else "float32"  # a prompt's chunks are products of what it is given
    yield Case(gated_delta, f"{kind} {pairs}/{2 * pairs}x{_STATE}x{_STATE}", rows, delta, workload, products)
    yield Case(deinterleave, f"{pairs}x{6 * _STATE}", rows, columns, workload)
    yield Case(gated_rms_norm, f"{inner}", rows, norm, workload)
    yield Case(gated_mean_square, f"{inner}", rows, lambda: (randn(rows, inner), randn(rows, inner)), workload)
    yield Case(sharded_gated_rms_norm, f"{inner}", rows, divided, workload)


def _batch(workload: Workload, shape: tuple[int, ...], dtype: torch.dtype) -> Batch:
    """One layer, whose two states are one tensor: a call reads its own."""
    sequences = len(workload.new)
    kept: Tensor = torch.zeros(sequences, *shape, dtype=dtype)
    states = RecurrentStates(((kept, kept),), torch.arange(sequences, dtype=torch.int32))
    starts = [total - new for new, total in zip(workload.new, workload.total, strict=True)]
    at = [start + i for start, new in zip(starts, workload.new, strict=True) for i in range(new)]
    positions = torch.tensor(at, dtype=torch.int32)
    offsets = torch.tensor([0, *workload.new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(positions, positions, offsets, max(workload.new), states=states)
