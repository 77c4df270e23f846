"""Granite 4's hybrids (IBM 2025): layers with a state space of Mamba-2, a few with attention; MLPs, experts too."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from strata.kernels.activation.scale import times
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.experts import SparseMLP
from strata.models.family.mamba2 import StateSpace, kept_by
from strata.models.layers import MLP, Attention, CausalLM, Layer, RMSNorm
from strata.models.recurrence.state_space_config import StateSpaceConfig
from strata.models.state import LayerState, PagedRows


class GraniteLayer(Layer):
    """Pre-norm residual block: attention or a state space, then MLP and experts; what each adds is multiplied first."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        space = config.recurrence
        assert isinstance(space, StateSpaceConfig)
        assert config.multipliers is not None
        self.residual = config.multipliers.residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = self.mamba = None
        if space.layers[layer]:
            self.mamba = StateSpace(config.hidden_size, space, config.norm_eps, layer)
        else:
            self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        experts = config.experts
        self.mlp = MLP(config) if experts is None else SparseMLP(config.hidden_size, experts, MLP(config))

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        if self.mamba is not None:
            mixed = self.mamba(normed, batch)
        else:
            assert self.self_attn is not None
            mixed = self.self_attn(normed, batch, cos, sin)
        x = x + times(mixed, self.residual)
        return x + times(self.mlp(self.post_attention_layernorm(x)), self.residual)


class MultipliedNorm(RMSNorm):
    """A norm whose result is multiplied: logits follow, so that a loss need not know of it."""

    def __init__(self, size: int, eps: float, factor: float) -> None:
        super().__init__(size, eps)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return times(super().forward(x), self.factor)


class GraniteHybrid(CausalLM):
    """`config.rotated` says whether positions rotate queries and keys. Checkpoints have all experts of a layer in one
    tensor, as the model has."""

    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {"shared_mlp.input_linear": ("gate_proj", "up_proj")}
    renamed: ClassVar[Mapping[str, str]] = {
        ".mlp.gate.weight": ".block_sparse_moe.router.layer.weight",
        ".mlp.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
        ".mlp.experts.down_proj": ".block_sparse_moe.output_linear.weight",
        ".mlp.shared_experts.down_proj.": ".shared_mlp.output_linear.",
        ".mlp.shared_experts.": ".shared_mlp.",
        ".mlp.down_proj.": ".shared_mlp.output_linear.",
        ".mlp.": ".shared_mlp.",
    }

    @classmethod
    def layer(cls, config: ModelConfig, layer: int) -> Layer:
        return GraniteLayer(config, layer)

    @staticmethod
    def last_norm(config: ModelConfig) -> RMSNorm:
        assert config.multipliers is not None
        return MultipliedNorm(config.hidden_size, config.norm_eps, config.multipliers.head)

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float | None:
        assert config.multipliers is not None
        return config.multipliers.embedding

    @staticmethod
    def states(config: ModelConfig) -> tuple[LayerState, ...]:
        rows, state = PagedRows((config.num_kv_heads, config.head_dim)), kept_by(config.recurrence)
        return tuple(rows if attends else state for attends in config.attends)
