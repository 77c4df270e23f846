"""The calls by which ranks round what they add up, of hidden states of the model that is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import BF16_BYTES, Case, Scalable, case_of, randn
from strata.kernels.collective.quantized_shards import dequantize_shards, quantize_shards, shard_bytes, sum_shards
from strata.models.config import ModelConfig

_RANKS = 2


def message_cases(config: ModelConfig) -> Iterator[Scalable]:
    """Of one of two ranks."""
    hidden, width = config.hidden_size, config.hidden_size // _RANKS
    row_bytes = shard_bytes(width)

    def parts(rows: int) -> torch.Tensor:
        """The least values of their type, times the least power of two."""
        return torch.ones(_RANKS, rows, row_bytes, dtype=torch.uint8)

    def rounding(rows: int) -> Case:
        return case_of(quantize_shards, f"{hidden}", rows, lambda: (randn(rows, hidden), _RANKS))

    def adding(rows: int) -> Case:
        return case_of(sum_shards, f"{hidden}", rows, lambda: (parts(rows), width))

    def widening(rows: int) -> Case:
        return case_of(dequantize_shards, f"{hidden}", rows, lambda: (parts(rows), width, torch.bfloat16))

    yield rounding, hidden * BF16_BYTES + _RANKS * row_bytes
    yield adding, (_RANKS + 1) * row_bytes
    yield widening, hidden * BF16_BYTES + _RANKS * row_bytes
