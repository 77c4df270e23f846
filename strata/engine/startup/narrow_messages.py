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
    group, ranks = asked.all_reduce_group_size, asked.tensor_parallel_size
    if group < 1 or (group > 1 and (group >= ranks or ranks % group)):
        accepted = ", ".join(str(size) for size in range(1, ranks) if ranks % size == 0) or "1"
        raise ValueError(
            f"all_reduce_group_size={group} makes no groups of tensor_parallel_size={ranks} ranks; accepted are "
            f"divisors below: {accepted}"
        )
    if not asked.narrow_messages:
        return
    given = f"message_dtype={asked.message_dtype!r}"
    if asked.tensor_parallel_size == 1:
        raise ValueError(f"{given} rounds what ranks add up, and tensor_parallel_size=1 adds up nothing; leave it out")


def check_columns(asked: EngineConfig, config: ModelConfig) -> None:
    """Raises ValueError if ranks that round what they add up, or add it up in groups, do not divide its columns."""
    if asked.narrow_messages:
        check_width(config.hidden_size, asked.tensor_parallel_size)
    if config.hidden_size % asked.all_reduce_group_size:
        raise ValueError(
            f"all_reduce_group_size={asked.all_reduce_group_size} does not divide hidden_size = {config.hidden_size}; "
            "leave it out"
        )
