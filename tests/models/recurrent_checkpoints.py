"""Configs of families that keep states of fixed size, and their steps by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.families import FAMILIES
from strata.models.state import RecurrentState

from .batches import HandPaged
from .later_checkpoints import Config, family


def _of(name: str, model_type: str, vocab: int, hidden: int, layers: int, **own: Any) -> Config:
    return family(name, model_type, vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, **own)


def _granite(vocab: int, hidden: int, types: list[str], **own: Any) -> Config:
    own = {"intermediate_size": 7, "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": types} | own
    return _of("GraniteMoeHybrid", "granitemoehybrid", vocab, hidden, len(types), **own)


_mamba2 = partial(_of, "Mamba2", "mamba2")
_qwen3_next = partial(_of, "Qwen3Next", "qwen3_next", num_experts_per_tok=2, max_position_embeddings=4096)


# fmt: off
RECURRENT_CONFIGS: dict[str, Config] = {
    "mamba2": _mamba2(97, 24, 2, num_heads=6, head_dim=8, n_groups=3, state_size=12, conv_kernel=4, chunk_size=64),
    "mamba2-limited-tied": _mamba2(
        83, 20, 2, num_heads=3, head_dim=20, expand=3, n_groups=1, state_size=9, conv_kernel=2, chunk_size=32,
        use_bias=True, use_conv_bias=False, residual_in_fp32=False, time_step_limit=[0.02, 0.6],
        layer_norm_epsilon=1e-4, tie_word_embeddings=True,
    ),
    "mamba2-wide-heads": _mamba2(
        61, 28, 3, num_heads=2, head_dim=28, n_groups=2, state_size=5, conv_kernel=3, time_step_limit=[0.0, 2.5],
    ),
    "granite-hybrid": _granite(
        97, 24, ["mamba", "attention", "mamba"], shared_intermediate_size=41, num_attention_heads=4,
        num_key_value_heads=2, mamba_n_heads=6, mamba_d_state=10, mamba_n_groups=2, mamba_chunk_size=64,
        position_embedding_type="nope", embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.3,
        logits_scaling=3.0, max_position_embeddings=4096,
    ),
    "granite-hybrid-rope-tied": _granite(
        61, 30, ["full_attention", "linear_attention"], shared_intermediate_size=20, num_attention_heads=3,
        mamba_n_heads=4, mamba_d_head=15, mamba_d_state=6, mamba_d_conv=3, mamba_proj_bias=True, attention_bias=True,
        position_embedding_type="rope", rope_theta=500000.0, residual_multiplier=0.7, time_step_limit=[0.01, 3.0],
        tie_word_embeddings=True, max_position_embeddings=2048,
    ),
    "granite-hybrid-experts": _granite(
        97, 24, ["mamba", "attention"], intermediate_size=12, num_local_experts=5, num_experts_per_tok=2,
        shared_intermediate_size=28, num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=4, mamba_d_state=8,
        residual_multiplier=0.5, attention_multiplier=0.25, max_position_embeddings=2048,
    ),
    "granite-hybrid-recurrent-only": _granite(
        53, 16, ["mamba"], shared_intermediate_size=24, num_attention_heads=4, mamba_n_heads=2, mamba_d_state=8,
        mamba_conv_bias=False, logits_scaling=8.0, max_position_embeddings=2048,
    ),
    "qwen3-next": _qwen3_next(
        97, 24, 2, full_attention_interval=2, intermediate_size=31, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, linear_num_key_heads=2, linear_key_head_dim=10, linear_num_value_heads=4, linear_value_head_dim=8,
        linear_conv_kernel_dim=4, num_experts=6, moe_intermediate_size=12, shared_expert_intermediate_size=20,
        rope_theta=10000000.0,
    ),
    "qwen3-next-dense-layers-tied": _qwen3_next(
        61, 28, 3, layer_types=["full_attention", "linear_attention", "linear_attention"], decoder_sparse_step=2,
        mlp_only_layers=[2], intermediate_size=23, num_attention_heads=3, num_key_value_heads=1, head_dim=20,
        linear_num_key_heads=1, linear_key_head_dim=6, linear_num_value_heads=3, linear_value_head_dim=14,
        linear_conv_kernel_dim=3, num_experts=5, moe_intermediate_size=12, shared_expert_intermediate_size=7,
        norm_topk_prob=False, attention_bias=True, rms_norm_eps=1e-2, rope_parameters={"rope_type": "linear",
        "factor": 2.0, "rope_theta": 5000.0, "partial_rotary_factor": 0.5}, tie_word_embeddings=True,
    ),
    "qwen3-next-recurrent-only": _qwen3_next(
        53, 20, 1, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, linear_num_key_heads=3,
        linear_key_head_dim=5, linear_num_value_heads=3, linear_value_head_dim=9, linear_conv_kernel_dim=2,
        num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=4,
    ),
}
# fmt: on


class HandStates:
    """Fixed states of a few sequences, in rows that go backwards and that nobody has filled, and pages of layers that
    attend."""

    def __init__(self, config: ModelConfig, sequences: int, dtype: torch.dtype = torch.float32) -> None:
        self.paged, self.attends = HandPaged(config, sequences, longest=131, dtype=dtype), any(config.attends)
        self.tensors = tuple(
            tuple(
                torch.full((sequences + 1, *shape), torch.nan, dtype=one or dtype)
                for shape, one in zip(state.shapes, state.dtypes, strict=True)
            )
            if isinstance(state, RecurrentState)
            else ()
            for state in FAMILIES[config.architecture].states(config)
        )

    def next_batch(self, chunks: dict[int, Sequence[int]]) -> Batch:
        """The next tokens of some sequences, by their number."""
        slots = torch.tensor([len(self.paged.lengths) - row for row in chunks], dtype=torch.int32)
        batch = self.paged.next_batch(chunks)
        return replace(batch, pages=batch.pages if self.attends else None, states=RecurrentStates(self.tensors, slots))
