"""What the start of an engine asks of the other ranks; of an engine of one rank, nothing."""

from __future__ import annotations

from typing import Protocol

import torch

from strata.comm.mesh import Axis
from strata.engine.engine_config import EngineConfig
from strata.models.config import ModelConfig
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard


class Rank(Protocol):
    """The place of this process among the ranks of an engine.

    index: from 0 to size - 1; rank 0 schedules.
    """

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

    def least(self, value: int) -> int:
        """The least that any rank tells; all call this in one order, and none goes on before all have. Raises
        EngineFault if one has ended."""

    def join(self, device: torch.device) -> dict[str, Axis]:
        """The axes of the ranks' mesh on which this one lies, by name, once all have called this."""


class OneRank:
    """A process alone."""

    index, size = 0, 1

    def least(self, value: int) -> int:
        return value

    def join(self, device: torch.device) -> dict[str, Axis]:
        return {TENSOR_AXIS: Axis(TENSOR_AXIS, 1, 0, (0,), None)}


def share_of(asked: EngineConfig, config: ModelConfig, index: int, axis: Axis | None = None) -> RankShard:
    """What rank `index` of such an engine has of a model of `config`. axis: along which they divide matrices, where it
    is known.

    Raises ValueError if they cannot share it.
    """
    by_experts, redundant = asked.enable_expert_parallel, asked.redundant_slots
    size = asked.tensor_parallel_size
    own_tokens, place = asked.enable_dp_attention, asked.places(index)[TENSOR_AXIS]
    return RankShard.of(
        config, size, place, axis, expert_parallel=by_experts, redundant=redundant, own_tokens=own_tokens
    )
