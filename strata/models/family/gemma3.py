"""Gemma 3's language models (Kamath et al. 2025): norms around both branches, windows, GEGLU, scaled embeddings."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from torch import Tensor

from strata.kernels.activation.silu_mul import gelu_mul
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.layers import MLP, Attention, CausalLM, DecoderLayer, LayerAttention, WideRMSNorm


class Gemma3MLP(MLP):
    """GEGLU (Shazeer 2020): down(gelu(gate(x)) * up(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gelu_mul(self.gate_proj(x), self.up_proj(x)))


class Gemma3Attention(Attention):
    """Attention with an RMSNorm over head_dim, shared by the heads, on queries and on keys."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
        self.q_norm = WideRMSNorm(config.head_dim, config.norm_eps, offset=1.0)
        self.k_norm = WideRMSNorm(config.head_dim, config.norm_eps, offset=1.0)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class Gemma3Layer(DecoderLayer):
    """Residual block whose branches are normalized before and behind."""

    def __init__(self, config: ModelConfig, attention: LayerAttention) -> None:
        super().__init__(config, attention)
        self.mlp = Gemma3MLP(config)
        self.input_layernorm = WideRMSNorm(config.hidden_size, config.norm_eps, offset=1.0)
        self.post_attention_layernorm = WideRMSNorm(config.hidden_size, config.norm_eps, offset=1.0)
        self.pre_feedforward_layernorm = WideRMSNorm(config.hidden_size, config.norm_eps, offset=1.0)
        self.post_feedforward_layernorm = WideRMSNorm(config.hidden_size, config.norm_eps, offset=1.0)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), batch, cos, sin))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3(CausalLM):
    """Embeddings times sqrt(hidden_size); window layers are rotated by `config.window_rope`."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        return Gemma3Attention(config, layer)

    @staticmethod
    def decoder_layer(config: ModelConfig, attention: LayerAttention) -> DecoderLayer:
        return Gemma3Layer(config, attention)

    @staticmethod
    def last_norm(config: ModelConfig) -> WideRMSNorm:
        return WideRMSNorm(config.hidden_size, config.norm_eps, offset=1.0)

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        return config.hidden_size**0.5
