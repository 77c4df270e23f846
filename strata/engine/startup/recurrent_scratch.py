"""What recurrences hand on between their kernels: memory that a step needs beside its activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from strata.kernels.recurrent import delta_chunks_cuda
from strata.models.config import ModelConfig
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig


def recurrent_bytes(asked: EngineConfig, config: ModelConfig, max_tokens: int, dtype: torch.dtype) -> int:
    """On a GPU, in the largest step, whose padding may be one more sequence. config: of a rank. In deterministic mode a
    state goes from token to token."""
    delta = config.recurrence
    if asked.deterministic or not isinstance(delta, GatedDeltaConfig):
        return 0
    heads = delta.heads, delta.key_dim, delta.value_dim
    return delta_chunks_cuda.scratch_bytes(max_tokens, asked.max_sequences + 1, *heads, dtype)
