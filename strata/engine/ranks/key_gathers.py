"""Whether ranks that divide keys by sequence gather those that a step reads, or its queries and what these find."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from strata.models.state import attention_rows
from strata.parallel.serving_shard import RankShard


class KeyGathers(NamedTuple):
    """key: bytes of a token's keys and values of one layer. joined: of what all ranks find for a token's queries there,
    in float32."""

    key: int
    joined: int

    @staticmethod
    def of(shard: RankShard, dtype: torch.dtype) -> KeyGathers:
        """Of a rank of a model in `dtype`."""
        config, rows = shard.config, attention_rows(shard.config)
        width = config.head_dim if config.latent is None else config.latent.rank
        heads = shard.kept.ranks * config.num_heads
        key = rows.tensors * rows.shape[0] * rows.shape[1] * (rows.dtype or dtype).itemsize
        return KeyGathers(key, 4 * heads * (width + 1))

    def pays(self, counts: NDArray[Any], ends: NDArray[Any], page_tokens: int) -> bool:
        """Of a step that runs so many tokens of sequences that have so many then, [sequences] each: with prompts, and
        the keys of all, in as many pages of `page_tokens` as the longest has, are no more bytes than what would be
        joined. So gathered keys find room where that does."""
        tokens = int(counts.sum())
        if tokens == len(counts):
            return False
        longest = -(-int(ends.max(initial=0)) // page_tokens) * page_tokens
        return len(ends) * longest * self.key <= tokens * self.joined
