"""The calls of operations that only some families have, at the sizes of the model that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from strata.bench.kernels.case import BF16_BYTES, EPS, FP32_BYTES, Case, Scalable, angles, case_of, randn
from strata.kernels.activation.gelu_mul import gelu_mul
from strata.kernels.activation.scale import scale, softcap, times
from strata.kernels.linear.wide_linear import wide_linear
from strata.kernels.norm.divided_norm import divided_rms_norm, mean_square
from strata.kernels.norm.wide_norm import wide_rms_norm
from strata.kernels.rotary.partial_rope import partial_rope
from strata.kernels.rotary.tail_rope import tail_rope
from strata.models.config import ModelConfig

# Experts that a router scores, ranks that divide a norm's row, and the largest logit, as families have them.
_EXPERTS, _RANKS, _CAP = 128, 2, 30.0


def family_cases(config: ModelConfig) -> Iterator[Scalable]:
    """Gemma's and OLMo's norms, Gemma's gating, embedding and logits, Granite's residuals, Phi's and GLM's rotation,
    GLM's router, and what ranks do of OLMo's norm of whole queries."""
    hidden, inner, heads, dim = config.hidden_size, config.intermediate_size, config.num_heads, config.head_dim

    def norm(rows: int) -> Case:
        return case_of(wide_rms_norm, f"{hidden}", rows, lambda: (randn(rows, hidden), randn(hidden), EPS, 1.0))

    def squares(rows: int) -> Case:
        return case_of(mean_square, f"{hidden}", rows, lambda: (randn(rows, hidden),))

    def divided(rows: int) -> Case:
        def make() -> tuple[Any, ...]:
            x = randn(rows, hidden)
            return x, _RANKS * mean_square.reference(x), _RANKS, randn(hidden), EPS, 0.0

        return case_of(divided_rms_norm, f"{hidden}", rows, make)

    def gating(rows: int) -> Case:
        def library(gate: Tensor, up: Tensor) -> Tensor:
            return F.gelu(gate, approximate="tanh") * up

        return case_of(gelu_mul, f"{inner}", rows, lambda: tuple(randn(rows, 2 * inner).chunk(2, -1)), library)

    def scaling(rows: int) -> Case:
        return case_of(scale, f"{hidden}", rows, lambda: (randn(rows, hidden), hidden**0.5))

    def multiplying(rows: int) -> Case:
        return case_of(times, f"{hidden}", rows, lambda: (randn(rows, hidden), 0.22))

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
    yield squares, hidden * BF16_BYTES
    yield gating, 3 * inner * BF16_BYTES
    yield ends, 2 * heads * dim * BF16_BYTES
    yield rotation, 2 * heads * dim * BF16_BYTES
    yield scores, hidden * BF16_BYTES + _EXPERTS * FP32_BYTES
