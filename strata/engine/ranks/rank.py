"""What the start of an engine asks of the other ranks; of an engine of one rank, nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from strata.comm.mesh import Axis
from strata.engine.engine_config import EngineConfig
from strata.models.config import ModelConfig
from strata.parallel.serving_shard import PIPELINE_AXIS, TENSOR_AXIS, RankShard


class Rank(Protocol):
    """The place of this process among the ranks of an engine.

    index: from 0 to size - 1; rank 0 schedules.
    """

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

    def min_over_ranks(self, value: int) -> int:
        """The least that any rank tells; all call this in one order, and none goes on before all have. Raises
        EngineFault if one has ended."""

    def join(self, device: torch.device) -> dict[str, Axis]:
        """The axes of the ranks' mesh on which this one lies, by name, once all have called this."""


class OneRank:
    """A process alone."""

    index, size = 0, 1

    def min_over_ranks(self, value: int) -> int:
        return value

    def join(self, device: torch.device) -> dict[str, Axis]:
        return {name: Axis(name, 1, 0, (0,), None) for name in (PIPELINE_AXIS, TENSOR_AXIS)}


def share_of(asked: EngineConfig, config: ModelConfig, index: int) -> RankShard:
    """What rank `index` of such an engine has of a model of `config`.

    Raises ValueError if they cannot share it.
    """
    by_experts, redundant = asked.enable_expert_parallel, asked.redundant_slots
    place = asked.places(index)
    return RankShard.of(
        config,
        asked.tensor_parallel_size,
        place[TENSOR_AXIS],
        expert_parallel=by_experts,
        redundant=redundant,
        attention_dp=asked.enable_dp_attention,
        stages=asked.pipeline_parallel_size,
        stage=place[PIPELINE_AXIS],
        key_ranks=asked.decode_context_parallel_size,
    )


def share_of_all_layers(asked: EngineConfig, config: ModelConfig, axis: Axis) -> RankShard | None:
    """What the first of the ranks that divide matrices would have if one stage had all layers; None if there is one
    rank then. axis: of these ranks.

    Raises ValueError if they cannot share it.
    """
    if asked.tensor_parallel_size == 1:
        return None
    shard = share_of(replace(asked, pipeline_parallel_size=1), config, 0)
    return replace(shard, axes={**shard.axes, TENSOR_AXIS: axis})
