"""What config.json says of latent attention: the ranks of what queries, keys and values are made from (DeepSeek-V2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.files.fields import Fields


@dataclass(frozen=True)
class LatentConfig:
    """Sizes are counts of elements.

    query_rank: of the latent of queries; None: they are made from the hidden state. rank: of the latent of keys and
    values. nope, rope: dimensions of a head's queries and keys that positions leave alone, and those that they rotate.
    value: of a head's values. paired: neighbours turn together, not halves.
    """

    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int
    paired: bool = True

    @property
    def width(self) -> int:
        """Of the row that is kept of a token."""
        return self.rank + self.rope


def read_latent(fields: Fields, num_heads: int, has_paired_field: bool) -> LatentConfig:
    """From `q_lora_rank`, `kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`; has_paired_field:
    `rope_interleave`, too. Every head has keys and values of its own."""
    fields.only("num_key_value_heads", num_heads, f"each of the num_attention_heads = {num_heads} has its own")
    direct = fields.is_null("q_lora_rank")
    query_rank = fields.take("q_lora_rank") if direct else fields.count("q_lora_rank", 1536)
    rope = fields.count("qk_rope_head_dim", 64)
    if rope % 2:
        raise fields.wrong("qk_rope_head_dim", rope, "an even number, because rotary embeddings turn pairs")
    fields.only("head_dim", rope, "transformers takes qk_rope_head_dim for it")
    nope = fields.count("qk_nope_head_dim", 128)
    fields.only("qk_head_dim", nope + rope, "it is the sum of qk_nope_head_dim and qk_rope_head_dim")
    return LatentConfig(
        query_rank,
        fields.count("kv_lora_rank", 512),
        nope,
        rope,
        fields.count("v_head_dim", 128),
        fields.flag("rope_interleave", True) if has_paired_field else True,
    )


def latent_fields(latent: LatentConfig, has_paired_field: bool) -> dict[str, Any]:
    """What `read_latent` reads."""
    values = {
        "head_dim": latent.rope,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.nope,
        "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.value,
    }
    return values | ({"rope_interleave": latent.paired} if has_paired_field else {})
