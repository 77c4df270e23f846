"""The calls of operations that only some families have, at the sizes of the model that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import BF16_BYTES, EPS, FP32_BYTES, Case, Scalable, angles, case_of, randn
from strata.kernels.activation.scale import scale, softcap, times
from strata.kernels.activation.sigmoid_gate import sigmoid_gate
from strata.kernels.activation.silu_mul import Clamp, clamped_swiglu, gelu_mul
from strata.kernels.linear.linear import wide_linear
from strata.kernels.moe.experts import biased_experts
from strata.kernels.norm.norm import mean_square, sharded_rms_norm, wide_rms_norm
from strata.kernels.rotary.rope import partial_rope, tail_rope
from strata.models.config import ModelConfig

# Experts that a router scores, ranks that divide a norm's row, and the largest logit, as families have them.
_EXPERTS, _RANKS, _CAP = 128, 2, 30.0
# gpt-oss: its bounds, and the experts of a layer and of a token in its smaller model, and how wide they are at most.
_CLAMP, _BIASED_EXPERTS, _PER_TOKEN, _EXPERT_WIDTH = Clamp(1.702, 7.0), 32, 4, 2880


def family_cases(config: ModelConfig) -> Iterator[Scalable]:
    """gpt-oss's experts and their activation, Gemma's and OLMo's norms, Gemma's gating, embedding and logits, Granite's
    residuals, Qwen3-Next's gates, Phi's and GLM's rotation, GLM's router, and what ranks do of OLMo's norm of whole
    queries."""
    hidden, inner, heads, dim = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim

    def norm(rows: int) -> Case:
        return case_of(wide_rms_norm, f"{hidden}", rows, lambda: (randn(rows, hidden), randn(hidden), EPS, 1.0))

    def squares(rows: int) -> Case:
        return case_of(mean_square, f"{hidden}", rows, lambda: (randn(rows, hidden),))

    def divided(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            x = randn(rows, hidden)
            return x, _RANKS * mean_square.reference(x), _RANKS, randn(hidden), EPS, 0.0

        return case_of(sharded_rms_norm, f"{hidden}", rows, make)

    def gating(rows: int) -> Case:
        def library(gate: Tensor, up: Tensor) -> Tensor:
            return F.gelu(gate, approximate="tanh") * up

        return case_of(gelu_mul, f"{inner}", rows, lambda: tuple(randn(rows, 2 * inner).chunk(2, -1)), library)

    def bounded(rows: int) -> Case:
        return case_of(clamped_swiglu, f"{inner}", rows, lambda: (*randn(rows, 2 * inner).chunk(2, -1), _CLAMP))

    def mixture(rows: int) -> Case:
        width = min(inner, _EXPERT_WIDTH)

        def make() -> tuple[Any, ...]:
            chosen = torch.rand(rows, _BIASED_EXPERTS).topk(_PER_TOKEN).indices
            matrices = randn(_BIASED_EXPERTS, 2 * width, hidden), randn(_BIASED_EXPERTS, hidden, width)
            biases = randn(_BIASED_EXPERTS, 2 * width), randn(_BIASED_EXPERTS, hidden)
            return randn(rows, hidden), torch.rand(rows, _PER_TOKEN), chosen, *matrices, *biases, _CLAMP

        return case_of(biased_experts, f"{_PER_TOKEN} of {_BIASED_EXPERTS} {hidden}x{width}", rows, make)

    def scaling(rows: int) -> Case:
        return case_of(scale, f"{hidden}", rows, lambda: (randn(rows, hidden), hidden**0.5))

    def multiplying(rows: int) -> Case:
        return case_of(times, f"{hidden}", rows, lambda: (randn(rows, hidden), 0.22))

    def opening(rows: int) -> Case:
        return case_of(sigmoid_gate, f"{hidden}", rows, lambda: (randn(rows, hidden), randn(rows, hidden)))

    def capping(rows: int) -> Case:
        return case_of(softcap, f"{hidden}", rows, lambda: (randn(rows, hidden), _CAP))

    def rotation(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            return randn(rows, heads, dim), *angles(rows, dim // 2)

        return case_of(partial_rope, f"{heads}x{dim // 2} of {dim}", rows, make)

    def scores(rows: int) -> Case:
        return case_of(
            wide_linear, f"{hidden}->{_EXPERTS}", rows, lambda: (randn(rows, hidden), randn(_EXPERTS, hidden))
        )

    def ends(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            return randn(rows, heads, dim), *angles(rows, dim // 2), True

        return case_of(tail_rope, f"{heads}x{dim // 2} of {dim}", rows, make)

    for both_ways in (norm, divided, scaling, multiplying, capping):
        yield both_ways, 2 * hidden * BF16_BYTES
    yield opening, 3 * hidden * BF16_BYTES
    yield squares, hidden * BF16_BYTES
    yield gating, 3 * inner * BF16_BYTES
    yield ends, 2 * heads * dim * BF16_BYTES
    yield bounded, 3 * inner * BF16_BYTES
    yield mixture, 2 * hidden * BF16_BYTES
    yield rotation, 2 * heads * dim * BF16_BYTES
    yield scores, hidden * BF16_BYTES + _EXPERTS * FP32_BYTES
