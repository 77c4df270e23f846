"""OLMo 2 and 3 (Team OLMo et al. 2024, 2025): norms on what a branch makes, and on whole queries and keys."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from torch import Tensor

from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.layers import Attention, CausalLM, DecoderLayer, LayerAttention, RMSNorm, WideRMSNorm


class Olmo2Attention(Attention):
    """Attention with an RMSNorm over all heads together, of queries and of keys, before they are rotated."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = WideRMSNorm(config.num_heads * config.head_dim, config.norm_eps)
        self.k_norm = WideRMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_norm(self.q_proj(x)).unflatten(-1, (-1, self.head_dim))
        k = self.k_norm(self.k_proj(x)).unflatten(-1, (-1, self.head_dim))
        return q, k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class Olmo2Layer(DecoderLayer):
    """Post-norm residual block: a branch reads the hidden states as they are, and is normalized before it is added."""

    def __init__(self, config: ModelConfig, attention: LayerAttention, norm: type[RMSNorm]) -> None:
        super().__init__(config, attention, norm)
        del self.input_layernorm
        self.post_feedforward_layernorm = norm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, batch, cos, sin))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2(CausalLM):
    """In OLMo 3 three layers in four have a window (`config.windows`), and are rotated by `config.window_rope`."""

    attention = Olmo2Attention
    decoder_layer = Olmo2Layer
    norm = WideRMSNorm
