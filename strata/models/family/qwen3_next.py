"""Qwen3-Next (Qwen team 2025): gated delta networks, in every fourth layer gated attention, and experts behind both."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from strata.kernels.activation.sigmoid_gate import sigmoid_gate
from strata.kernels.recurrent.deinterleave import deinterleave
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.state.kv_write import kv_write
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.expert_config import ExpertsConfig
from strata.models.experts import ExpertNames, SparseCausalLM, SparseMLP
from strata.models.family.mamba2 import GatedRMSNorm, ShortConvolution
from strata.models.layers import MLP, Attention, Layer, Linear, OffsetRMSNorm
from strata.models.recurrence.gated_delta_config import GatedDeltaConfig
from strata.models.state import LayerState, RecurrentState, attention_rows

# Decays in the beginning go from nothing to this, as in transformers.
_LARGEST_RATE = 16.0


class GatedDeltaNet(nn.Module):
    """A layer's mixing of tokens (Yang, Kautz and Hatamizadeh 2024): [tokens, hidden] to the same.

    Rows of in_proj_qkvz and in_proj_ba stand by key heads: each one's query, key, values and gates; strengths and
    decays. dt_bias, A_log: [heads].
    """

    def __init__(self, hidden_size: int, config: GatedDeltaConfig, norm_eps: float, layer: int) -> None:
        super().__init__()
        self.layer, self.key_heads, self.heads = layer, config.key_heads, config.heads
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        served = config.heads // config.key_heads
        values, keys = served * config.value_dim, config.key_heads * config.key_dim
        self.group, self.gate_group = (config.key_dim, config.key_dim, values, values), (served, served)
        self.parts, self.channels = [config.conv_size, config.inner_size], [keys, keys, config.inner_size]
        self.in_proj_qkvz = Linear(hidden_size, config.conv_size + config.inner_size, bias=False)
        self.in_proj_ba = Linear(hidden_size, 2 * config.heads, bias=False)
        self.conv1d = ShortConvolution(config.conv_size, config.width, layer, bias=False)
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(config.heads)) for _ in range(2))
        self.norm = GatedRMSNorm(config.value_dim, norm_eps, config.value_dim, gate_first=False)
        self.out_proj = Linear(config.inner_size, hidden_size, bias=False)

    def first_values(self, name: str) -> Tensor:
        """Of a vector [heads], to train from: rates of decay of all sizes up to the largest."""
        if name == "dt_bias":
            return torch.ones(self.heads, dtype=torch.float64, device="cpu")
        heads = torch.arange(1, self.heads + 1, dtype=torch.float64, device="cpu")
        return (heads * (_LARGEST_RATE / self.heads)).log()

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        grouped = self.in_proj_qkvz(x).unflatten(-1, (self.key_heads, -1))
        channels, gate = deinterleave(grouped, self.group).split_with_sizes(self.parts, -1)
        gates = deinterleave(self.in_proj_ba(x).unflatten(-1, (self.key_heads, -1)), self.gate_group)
        b, a = gates.split_with_sizes([self.heads, self.heads], -1)
        q, k, v = self.conv1d(channels, batch).split_with_sizes(self.channels, -1)
        q, k = q.unflatten(-1, (-1, self.key_dim)), k.unflatten(-1, (-1, self.key_dim))
        v = v.unflatten(-1, (-1, self.value_dim))
        mixed = gated_delta(q, k, v, a, b, self.dt_bias, self.A_log, batch, self.layer)
        return self.out_proj(self.norm(mixed, gate.unflatten(-1, (-1, self.value_dim))).flatten(-2))


class GatedAttention(Attention):
    """Attention with norms of heads, whose result a gate of each query lets through (Qiu et al. 2025).

    Rows of q_proj stand by heads: each one's query, then its gate.
    """

    head_norm = OffsetRMSNorm
    q_norm: OffsetRMSNorm
    k_norm: OffsetRMSNorm

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_proj = Linear(config.hidden_size, 2 * config.num_heads * config.head_dim, bias=config.attention_bias)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        both = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim))
        q, gate = both.split_with_sizes([self.head_dim, self.head_dim], -1)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = self.rotate(self.q_norm(q), cos, sin), self.rotate(self.k_norm(k), cos, sin)
        k, v = kv_write(k, v, batch.pages, self.spec.layer)
        return self.o_proj(sigmoid_gate(self.mix(q, k, v, batch), gate).flatten(-2))


class GatedSharedMLP(SparseMLP):
    """Experts, and one that every token goes to, through a gate of its own."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__(config.hidden_size, experts)
        self.shared_expert = MLP(replace(config, intermediate_size=experts.shared_size))
        self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sigmoid_gate(self.shared_expert(x), self.shared_expert_gate(x))


class Qwen3NextLayer(Layer):
    """Pre-norm residual block: attention or a gated delta network, then the MLP or experts."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        delta = config.recurrence
        assert isinstance(delta, GatedDeltaConfig)
        self.input_layernorm = OffsetRMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = self.linear_attn = None
        if delta.layers[layer]:
            self.linear_attn = GatedDeltaNet(config.hidden_size, delta, config.norm_eps, layer)
        else:
            self.self_attn = GatedAttention(config, layer)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        if self.linear_attn is not None:
            x = x + self.linear_attn(normed, batch)
        else:
            assert self.self_attn is not None
            x = x + self.self_attn(normed, batch, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Next(SparseCausalLM):
    """Checkpoints hold layers besides that predict further tokens, which are not read."""

    attention = GatedAttention
    norm = OffsetRMSNorm
    expert_names = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
    passed_over: ClassVar[tuple[str, ...]] = ("mtp.",)

    @classmethod
    def layer(cls, config: ModelConfig, layer: int) -> Layer:
        return Qwen3NextLayer(config, layer)

    @staticmethod
    def sparse_mlp(config: ModelConfig, experts: ExpertsConfig) -> nn.Module:
        return GatedSharedMLP(config, experts)

    @staticmethod
    def states(config: ModelConfig) -> tuple[LayerState, ...]:
        delta = config.recurrence
        assert isinstance(delta, GatedDeltaConfig)
        tail, state = (delta.conv_size, delta.width - 1), (delta.heads, delta.key_dim, delta.value_dim)
        rows, kept = attention_rows(config), RecurrentState((tail, state), (None, torch.float32))
        return tuple(rows if attends else kept for attends in config.attends)
