"""Which prompts attend to blocks of their keys: what is asked for, and what cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.kernels.attention.sparse import prompts_cuda
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.models.config import ModelConfig

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig

# Options that are whole numbers.
SPARSE_SIZES = ("sparse_prefill_min_keys", "sparse_prefill_block")
# The kernels take keys by so many at most.
_LEAST_BLOCK_ON_CUDA = 64


def check_sparse_attention(asked: EngineConfig) -> None:
    """Raises ValueError for a share or a block that cannot be, and for options that do not go with it."""
    share, block = asked.sparse_prefill, asked.sparse_prefill_block
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"sparse_prefill must be a share in (0, 1], or None to attend to all keys, got {share!r}")
    if block & (block - 1) or block < max(16, asked.page_size):
        raise ValueError(
            "sparse_prefill_block must be a power of two of at least 16 and of the tokens of a page, "
            f"{asked.page_size}, got {block}"
        )
    without = {
        "deterministic": False,
        "kv_cache_dtype": "auto",
        "prefill_context_parallel_size": 1,
        "enable_dp_attention": False,
    }
    given = next((name for name, default in without.items() if getattr(asked, name) != default), None)
    if given is not None:
        why = "depends on where prompts are cut" if given == "deterministic" else "is not there with it"
        raise ValueError(
            f"sparse_prefill={share} {why}, and {given}={getattr(asked, given)!r} is asked for; leave out one of them"
        )


def block_choice(asked: EngineConfig, config: ModelConfig, kind: str) -> BlockChoice | None:
    """As the layers of a model do on devices of a kind, None where all keys are attended to. Raises ValueError for a
    model, or blocks, of which that cannot be."""
    if asked.sparse_prefill is None:
        return None
    block, given = asked.sparse_prefill_block, f"sparse_prefill={asked.sparse_prefill}"
    if config.latent is not None:
        raise ValueError(f"{given} is not there for {config.architecture}, whose pages keep latents: leave it out")
    if not any(attends and window is None for attends, window in zip(config.attends, config.windows, strict=True)):
        raise ValueError(
            f"{given} leaves out keys of layers that see all, and {config.architecture} has none: leave it out"
        )
    if kind == "cuda" and block < _LEAST_BLOCK_ON_CUDA:
        raise ValueError(f"sparse_prefill_block={block} runs on a CPU alone: give {_LEAST_BLOCK_ON_CUDA} or more")
    return BlockChoice(asked.sparse_prefill, asked.sparse_prefill_min_keys, block, min(16, block // 4))


def choice_bytes(asked: EngineConfig, config: ModelConfig, max_tokens: int, max_length: int) -> int:
    """What choosing blocks needs in the largest step."""
    choice = block_choice(asked, config, "cpu")
    if choice is None:
        return 0
    return prompts_cuda.scratch_bytes(max_tokens, max_length, config.num_heads, config.num_kv_heads, choice)
