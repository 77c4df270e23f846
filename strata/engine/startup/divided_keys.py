"""Whether ranks can divide keys and values by sequence in an engine that is asked for, and what they need for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.kernels.attention.decode_cuda import MOST_GROUP
from strata.models.config import ModelConfig

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig

# Copies of what a rank has found, in float32, that are alive at once while ranks join it: as it was computed, packed
# for the others, and what has arrived.
_COPIES = 3


def check_divided_keys(asked: EngineConfig) -> None:
    """Raises ValueError if the ranks are not as many times as those that divide keys and values by sequence."""
    given = f"decode_context_parallel_size={asked.decode_context_parallel_size}"
    if asked.decode_context_parallel_size == 1:
        return
    if asked.tensor_parallel_size % asked.decode_context_parallel_size:
        raise ValueError(
            f"{given} divides keys among the ranks of tensor_parallel_size={asked.tensor_parallel_size}, of which it "
            f"must be a divisor: it needs {asked.decode_context_parallel_size} ranks for each KV head of the model, or "
            f"{asked.decode_context_parallel_size} in all where attention is latent"
        )


def check_kept_keys(asked: EngineConfig, config: ModelConfig) -> None:
    """Raises ValueError for a model whose keys and values cannot be divided so."""
    if asked.decode_context_parallel_size == 1:
        return
    kinds = {
        "layers with windows": any(window is not None for window in config.windows),
        "attention sinks": config.has_sinks,
        "recurrent layers": config.recurrence is not None,
    }
    kind = next((name for name, is_there in kinds.items() if is_there), None)
    if kind is not None:
        raise ValueError(
            f"decode_context_parallel_size={asked.decode_context_parallel_size} is not there for "
            f"{config.architecture}, which has {kind}: leave it out"
        )


def check_gathered_heads(asked: EngineConfig, config: ModelConfig, kind: str) -> None:
    """Raises ValueError if a KV head gets more queries from all ranks than kernels take. config: of a rank; kind: of
    implementations, "cuda" or "cpu", which takes any. Latents take any, too."""
    ranks, own = asked.decode_context_parallel_size, config.num_heads // config.num_kv_heads
    if ranks == 1 or kind != "cuda" or config.latent is not None or ranks * own <= MOST_GROUP:
        return
    accepted = ", ".join(str(one) for one in range(1, ranks) if ranks % one == 0 and one * own <= MOST_GROUP)
    raise ValueError(
        f"decode_context_parallel_size={ranks} gathers {ranks * own} query heads for a KV head, and kernels on GPUs "
        f"take at most {MOST_GROUP}; accepted are {accepted}"
    )


def joining_bytes(asked: EngineConfig, config: ModelConfig, tokens: int) -> int:
    """What ranks that divide keys need to join what they find in a step of so many tokens. config: of a rank."""
    ranks = asked.decode_context_parallel_size
    width = config.head_dim if config.latent is None else config.latent.rank
    return 0 if ranks == 1 else _COPIES * 4 * tokens * ranks * config.num_heads * (width + 1)
