"""Mamba-2 (Dao and Gu 2024): layers that keep a state of fixed size, and no attention at all."""

# A call of a module is untyped in torch.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from strata.kernels.recurrent.gated_norm import gated_rms_norm
from strata.kernels.recurrent.sequences import StateSpaceSpec
from strata.kernels.recurrent.short_convolution import short_convolution
from strata.kernels.recurrent.state_space import state_space
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.family_config import RecurrenceConfig
from strata.models.layers import CausalLM, Layer, Linear, RMSNorm
from strata.models.recurrence.state_space_config import StateSpaceConfig
from strata.models.state import LayerState, RecurrentState

# Time steps in the beginning lie between these (Gu and Dao 2023, section 3.6).
_FIRST_STEPS = (0.001, 0.1)


class ShortConvolution(nn.Module):
    """Over the latest tokens of each channel, then silu: [tokens, channels]; weight [channels, 1, width]."""

    def __init__(self, channels: int, width: int, layer: int, *, bias: bool) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.register_parameter("bias", nn.Parameter(torch.empty(channels)) if bias else None)
        # Of numbers that are uniform within 1 / sqrt(width), as torch begins its convolutions.
        self.deviation = (3 * width) ** -0.5

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return short_convolution(x, self.weight, self.bias, batch, self.layer, True)


class GatedRMSNorm(RMSNorm):
    """Of what a gate has let through (gate_first), or what a gate lets through of it, over groups of `group_size`
    columns."""

    def __init__(self, size: int, eps: float, group_size: int, *, gate_first: bool = True) -> None:
        super().__init__(size, eps)
        self.group_size, self.gate_first = group_size, gate_first

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return gated_rms_norm(x, gate, self.weight, self.eps, self.group_size, self.gate_first)


class StateSpace(nn.Module):
    """A layer's mixing of tokens: [tokens, hidden] to the same. A_log, D, dt_bias: [heads]."""

    def __init__(self, hidden_size: int, config: StateSpaceConfig, norm_eps: float, layer: int) -> None:
        super().__init__()
        inner, groups = config.inner_size, config.groups * config.state_size
        self.head_dim, self.state_size = config.head_dim, config.state_size
        self.parts, self.channels = [inner, config.conv_size, config.heads], [inner, groups, groups]
        self.spec = StateSpaceSpec(layer, config.min_step, config.max_step)
        self.in_proj = Linear(hidden_size, config.product_size, bias=config.bias)
        self.conv1d = ShortConvolution(config.conv_size, config.width, layer, bias=config.conv_bias)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(config.heads)) for _ in range(3))
        self.norm = GatedRMSNorm(inner, norm_eps, inner // config.groups)
        self.out_proj = Linear(inner, hidden_size, bias=config.bias)

    def first_values(self, name: str) -> Tensor:
        """Of a vector [heads], to train from: decays from 1 on, and time steps of all sizes, in no order of heads."""
        heads = torch.arange(1, len(self.D) + 1, dtype=torch.float64, device="cpu")
        if name == "A_log":
            return heads.log()
        if name == "D":
            return torch.ones_like(heads)
        low, high = map(math.log, _FIRST_STEPS)
        # Multiples of the golden ratio fill an interval evenly.
        steps = torch.exp(low + (high - low) * (heads * (math.sqrt(5) - 1) / 2).frac())
        return steps + torch.log(-torch.expm1(-steps))  # whose softplus the steps are

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate, channels, dt = self.in_proj(x).split_with_sizes(self.parts, -1)
        value, b, c = self.conv1d(channels, batch).split_with_sizes(self.channels, -1)
        value = value.unflatten(-1, (-1, self.head_dim))
        b, c = b.unflatten(-1, (-1, self.state_size)), c.unflatten(-1, (-1, self.state_size))
        mixed = state_space(value, dt, b, c, self.dt_bias, self.A_log, self.D, batch, self.spec)
        return self.out_proj(self.norm(mixed.flatten(-2), gate))


def kept_by(config: RecurrenceConfig | None) -> RecurrentState:
    """What a layer's convolution and its state space keep of a sequence."""
    assert isinstance(config, StateSpaceConfig)
    tail, state = (config.conv_size, config.width - 1), (config.heads, config.head_dim, config.state_size)
    return RecurrentState((tail, state), (None, torch.float32))


class NarrowingNorm(RMSNorm):
    """A norm of residuals that may be float32 where its weights are not; the result has the weights' dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.weight.dtype == torch.float32 else x.to(self.weight.dtype))


class Mamba2Layer(Layer):
    """Pre-norm residual block. It knows no positions but those that the state has come to."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert isinstance(config.recurrence, StateSpaceConfig)
        # Sums stay wide once they are.
        self.widens = config.recurrence.wide_residual and layer == 0
        self.norm = NarrowingNorm(config.hidden_size, config.norm_eps)
        self.mixer = StateSpace(config.hidden_size, config.recurrence, config.norm_eps, layer)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        mixed = self.mixer(self.norm(x), batch)
        narrow = self.norm.weight.dtype in (torch.bfloat16, torch.float16)
        return (x.to(torch.float32) if self.widens and narrow else x) + mixed


class Mamba2(CausalLM):
    norm = NarrowingNorm
    renamed: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.norm.": "backbone.norm_f.",
        "model.": "backbone.",
    }

    @classmethod
    def layer(cls, config: ModelConfig, layer: int) -> Layer:
        return Mamba2Layer(config, layer)

    @staticmethod
    def states(config: ModelConfig) -> tuple[LayerState, ...]:
        return (kept_by(config.recurrence),) * config.num_layers
