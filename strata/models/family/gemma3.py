"""Gemma 3's language models (Kamath et al. 2025): norms around both branches, windows, GEGLU, scaled embeddings."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from torch import Tensor

from strata.kernels.activation.silu_mul import gelu_mul
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.layers import MLP, Attention, CausalLM, DecoderLayer, LayerAttention, OffsetRMSNorm, RMSNorm


class Gemma3MLP(MLP):
    """GEGLU (Shazeer 2020): down(gelu(gate(x)) * up(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gelu_mul(self.gate_proj(x), self.up_proj(x)))


class Gemma3Attention(Attention):
    head_norm = OffsetRMSNorm


class Gemma3Layer(DecoderLayer):
    """Residual block whose branches are normalized before and behind."""

    def __init__(self, config: ModelConfig, attention: LayerAttention, norm: type[RMSNorm]) -> None:
        super().__init__(config, attention, norm)
        self.mlp = Gemma3MLP(config)
        self.pre_feedforward_layernorm = norm(config.hidden_size, config.norm_eps)
        self.post_feedforward_layernorm = norm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), batch, cos, sin))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3(CausalLM):
    """Embeddings times sqrt(hidden_size); window layers are rotated by `config.window_rope`."""

    attention = Gemma3Attention
    decoder_layer = Gemma3Layer
    norm = OffsetRMSNorm

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        return config.hidden_size**0.5
