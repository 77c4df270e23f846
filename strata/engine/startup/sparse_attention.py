"""Which keys prompts and decodes leave out: what is asked for, and what cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.kernels.attention.sparse import decodes, prompts
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.choice_triton import MAX_BLOCK
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.models.config import ModelConfig

if TYPE_CHECKING:
    from strata.engine.engine_config import EngineConfig

# Options that are whole numbers.
SPARSE_SIZES = ("sparse_prefill_min_keys", "sparse_prefill_block")
# The kernels take keys by so many at most.
_MIN_BLOCK_ON_CUDA = 64


def check_sparse_attention(asked: EngineConfig) -> None:
    """Raises ValueError for a share, a block or a number of pages that cannot be."""
    share, block, pages = asked.sparse_prefill, asked.sparse_prefill_block, asked.decode_pages
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise ValueError(f"sparse_prefill must be a share in (0, 1], or None to attend to all keys, got {share!r}")
    if share is not None and (block & (block - 1) or not max(16, asked.page_size) <= block <= MAX_BLOCK):
        raise ValueError(
            "sparse_prefill_block must be a power of two of at least 16 and of the tokens of a page, "
            f"{asked.page_size}, and at most {MAX_BLOCK}, got {block}"
        )
    if pages is not None and (isinstance(pages, bool) or not isinstance(pages, int) or pages < 2):
        raise ValueError(f"decode_pages must be an integer of at least 2, or None to attend to all, got {pages!r}")


def _given(asked: EngineConfig) -> str | None:
    """By which option keys are left out, with its value."""
    if asked.decode_pages is not None:
        return f"decode_pages={asked.decode_pages}"
    return None if asked.sparse_prefill is None else f"sparse_prefill={asked.sparse_prefill}"


def attention_choice(asked: EngineConfig, config: ModelConfig, kind: str) -> BlockChoice | PageChoice | None:
    """Which keys the layers of a model attend to on devices of a kind, None: all. config: of all its layers, of which a
    stage may have none that leaves out keys. Raises ValueError for a model, or blocks, of which that cannot be."""
    given, block = _given(asked), asked.sparse_prefill_block
    if given is None:
        return None
    if config.latent is not None:
        raise ValueError(f"{given} is not there for {config.architecture}, whose pages keep latents: leave it out")
    if not any(attends and window is None for attends, window in zip(config.attends, config.windows, strict=True)):
        raise ValueError(
            f"{given} leaves out keys of layers that see all, and {config.architecture} has none: leave it out"
        )
    if asked.sparse_prefill is not None and kind == "cuda" and block < _MIN_BLOCK_ON_CUDA:
        raise ValueError(f"sparse_prefill_block={block} runs on a CPU alone: give {_MIN_BLOCK_ON_CUDA} or more")
    return _choice(asked)


def _choice(asked: EngineConfig) -> BlockChoice | PageChoice | None:
    if asked.sparse_prefill is None:
        return None if asked.decode_pages is None else PageChoice(asked.decode_pages)
    block = asked.sparse_prefill_block
    return BlockChoice(float(asked.sparse_prefill), asked.sparse_prefill_min_keys, block, min(16, block // 4))


def choice_bytes(asked: EngineConfig, config: ModelConfig, max_tokens: int, max_length: int) -> int:
    """What choosing keys needs in the largest step. config: of a rank."""
    choice, kv_heads = _choice(asked), config.num_kv_heads
    if isinstance(choice, PageChoice):
        return decodes.scratch_bytes(asked.max_sequences, max_length, asked.page_size, kv_heads, choice)
    if choice is None:
        return 0
    return prompts.scratch_bytes(max_tokens, max_length, config.num_heads, kv_heads, choice)
