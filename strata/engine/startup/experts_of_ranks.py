"""Whether ranks can have experts, or sequences, of their own in an engine that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig


def without_effect(asked: EngineConfig) -> str | None:
    """What to tell whoever asks for experts on different ranks and has one rank, which vLLM takes too; None else."""
    if asked.enable_expert_parallel and asked.tensor_parallel_size == 1:
        return "enable_expert_parallel=True has no effect with tensor_parallel_size=1: one rank has all experts"
    return None


def check_experts(asked: EngineConfig) -> None:
    """Raises ValueError for options of experts, and of attention by requests, without those that they need."""
    redundant = asked.num_redundant_experts
    if redundant and not asked.enable_eplb:
        raise ValueError(f"num_redundant_experts={redundant} is room for copies, which enable_eplb=True makes")
    if asked.enable_eplb and not (asked.enable_expert_parallel and asked.tensor_parallel_size > 1):
        raise ValueError(
            "enable_eplb=True moves experts between ranks: it needs enable_expert_parallel=True and a "
            "tensor_parallel_size over 1"
        )
    if asked.enable_dp_attention and not (asked.enable_expert_parallel and asked.tensor_parallel_size > 1):
        raise ValueError(
            "enable_dp_attention=True lets ranks with sequences of their own share the experts of a mixture: it "
            "needs enable_expert_parallel=True and a tensor_parallel_size over 1; for engines that share nothing "
            "give data_parallel_size"
        )
