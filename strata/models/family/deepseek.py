"""DeepSeek-V2 and -V3 (DeepSeek-AI 2024): latent attention, and experts with shared ones behind a few dense layers."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.latent.attention import latent_attention
from strata.kernels.rotary.rope import tail_rope
from strata.kernels.state.latent_write import latent_write
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.experts import ExpertNames, SparseCausalLM
from strata.models.layers import Linear, RMSNorm

# Of the norms of latents, whatever `rms_norm_eps` says of the others.
_EPS = 1e-6


class LatentAttention(nn.Module):
    """Attention whose keys and values are made from one latent a token, [tokens, hidden] to the same.

    `kv_b_proj`, which makes them, is an operand of the attention: decodes bring queries into the space of the latent
    instead, and read one row for all heads.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        latent, bias = config.latent, config.attention_bias
        assert latent is not None
        self.spec = AttentionSpec(layer, config.attention_scale)
        self.head_dim, self.paired = latent.nope + latent.rope, latent.paired
        queries = config.num_heads * self.head_dim
        self.q_a_proj: Linear | None = None
        if latent.query_rank is None:
            self.q_proj = Linear(config.hidden_size, queries, bias=False)
        else:
            self.q_a_proj = Linear(config.hidden_size, latent.query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, _EPS)
            self.q_b_proj = Linear(latent.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, latent.width, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, _EPS)
        self.kv_b_proj = Linear(latent.rank, config.num_heads * (latent.nope + latent.value), bias=False)
        self.o_proj = Linear(config.num_heads * latent.value, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_proj(x) if self.q_a_proj is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = tail_rope(q.unflatten(-1, (-1, self.head_dim)), cos, sin, self.paired)
        norm, layer = self.kv_a_layernorm, self.spec.layer
        made = self.kv_a_proj_with_mqa(x)
        row = latent_write(made, norm.weight, norm.eps, cos, sin, batch.pages, layer, self.paired)
        mixed = latent_attention(q, row, self.kv_b_proj.weight, batch, self.spec)
        return self.o_proj(mixed.flatten(-2))


class DeepseekV2(SparseCausalLM):
    """Experts by a softmax, of the best groups alone in the larger models."""

    attention = LatentAttention
    expert_names = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


class DeepseekV3(DeepseekV2):
    """Experts by sigmoids, with biases for the choice. Layers that predict further tokens follow the last one in
    checkpoints."""

    has_layers_behind: ClassVar[bool] = True
