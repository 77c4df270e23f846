"""Whether what ranks add up can travel in 8 bits, or beside products, in an engine that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.graph.ranks.narrow_messages import check_width
from strata.models.config import ModelConfig

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig

_DTYPES = ("auto", "fp8", "fp8_e4m3")


def check_messages(asked: EngineConfig) -> None:
    """Raises ValueError for an unknown `message_dtype`, and where there is nothing that could be rounded, or travel."""
    if asked.overlap_tokens and asked.tensor_parallel_size == 1:
        raise ValueError(
            f"overlap_tokens={asked.overlap_tokens} lets what ranks add up travel beside products, and "
            "tensor_parallel_size=1 adds up nothing; leave it out"
        )
    if asked.message_dtype not in _DTYPES:
        raise ValueError(f"message_dtype {asked.message_dtype!r} is unknown; use {', '.join(_DTYPES)}")
    if not asked.narrow_messages:
        return
    given = f"message_dtype={asked.message_dtype!r}"
    if asked.tensor_parallel_size == 1:
        raise ValueError(f"{given} rounds what ranks add up, and tensor_parallel_size=1 adds up nothing; leave it out")


def check_columns(asked: EngineConfig, config: ModelConfig) -> None:
    """Raises ValueError if ranks that round what they add up do not divide its columns."""
    if asked.narrow_messages:
        check_width(config.hidden_size, asked.tensor_parallel_size)
