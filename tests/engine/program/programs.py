"""Step programs of models that are here, as an engine would be asked for them."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from strata.cache.groups import PageGroup
from strata.cache.pool import PoolShape
from strata.cache.tables import BufferShape
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.program.program import StepProgram
from strata.engine.program.shape import StepShape
from strata.engine.program.source import Target
from strata.kernels.device_limits import DeviceLimits
from strata.parallel.serving_shard import RankShard


def plain_sizes(shape: PoolShape, sequences: int, tokens: int, length: int) -> EngineSizes:
    """Of an engine whose layers keep rows alike."""
    return EngineSizes(length, tokens, sequences, shape, (PageGroup(tuple(range(shape.layers)), None, shape),), 0, 0)


def step_program(
    model: nn.Module,
    kind: str = "cpu",
    deterministic: bool = False,
    *,
    shard: RankShard | None = None,
    limits: DeviceLimits | None = None,
    target: dict[str, Any] | None = None,
    **options: Any,
) -> StepProgram:
    """target: more fields of `Target`. options: of `EngineConfig`; there are as many ranks as share the model."""
    ranks = 1 if shard is None else shard.size
    asked = EngineConfig("test", deterministic=deterministic, tensor_parallel_size=ranks, **options)
    return StepProgram.of(model, asked, Target(kind, limits, shard=shard, **(target or {})))


def graph_of(program: StepProgram, name: str) -> fx.GraphModule:
    """Of a variant that the program has, or a graph of its own."""
    return program.graphs()[name]


def replayed(program: StepProgram, tokens: int) -> fx.GraphModule:
    """What replays steps with prompts of so many tokens."""
    return program.replayed(BufferShape(tokens, tokens + 1, tokens)).graph


def decode(program: StepProgram, sequences: int) -> fx.GraphModule:
    """What replays steps of so many decodes."""
    return program.replayed(BufferShape(sequences, sequences, sequences)).graph


def launched(program: StepProgram, tokens: int) -> fx.GraphModule:
    """What is launched in steps with prompts of so many tokens."""
    return program.choose(StepShape(tokens, 1, 1, 1)).variant.graph
