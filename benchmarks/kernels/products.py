"""The products of a model's layers and of its head: the calls that `strata bench kernels` tunes and measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.published import Published, Sizes
from strata.hardware.replay import copies_beyond_l2
from strata.kernels.linear.prenorm import linear_add, scaled_linear_silu_mul
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.linear.small_m import SmallMProduct
from strata.kernels.op import OPERATIONS, Operation

DTYPE = torch.bfloat16
_EPS = 1e-6
# About what a weight streams at: only for how often to repeat a call.
_BYTES_PER_SECOND = 4e12


@dataclass(frozen=True)
class Product:
    """An operation and the weight of a model that it multiplies by, [out, width]."""

    model: str
    name: str
    operation: str
    out: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.out * self.width * DTYPE.itemsize

    @property
    def operator(self) -> Operation:
        return OPERATIONS[self.operation]

    def weights(self) -> list[Tensor]:
        """Random weights, enough of them that taking turns leaves none in the cache."""
        return [self._weight() for _ in range(copies_beyond_l2(self.nbytes))]

    def _weight(self) -> Tensor:
        return torch.randn(self.out, self.width, dtype=DTYPE, device="cuda").mul_(self.width**-0.5)

    def call(self, rows: int, weight: Tensor) -> SmallMProduct:
        """A product of random rows with a weight, on its device."""

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=DTYPE, device=weight.device)

        x = randn(rows, self.width)
        if self.operation == "linear":
            return SmallMProduct(x, weight)
        if self.operation == linear_add.name:
            return SmallMProduct(x, weight, residual=randn(rows, self.out), norm_weight=randn(self.out))
        if self.operation == linear_silu_mul.name:
            return SmallMProduct(x, weight, gated=True)
        # As many blocks of squares as a `linear_add` with few or with more rows leaves.
        blocks = max(1, self.width // (4 if rows <= 2 else 64))
        squares = torch.rand(rows, blocks, device=weight.device).mul_(2 * self.width / blocks)
        return SmallMProduct(x, weight, None, squares, _EPS, gated=self.operation == scaled_linear_silu_mul.name)

    def estimate(self, rows: int) -> float:
        """About how many seconds a product with so many rows takes."""
        return self.nbytes / _BYTES_PER_SECOND * max(1.0, rows / 256)


def arguments(call: SmallMProduct) -> tuple[Any, ...]:
    """What the operation is called with that `call` stands for."""
    if call.squares is not None:
        return call.x, call.squares, call.eps, call.weight, call.bias
    if call.residual is not None:
        return call.x, call.weight, call.bias, call.residual, call.norm_weight
    return call.x, call.weight, call.bias


def products(model: str, sizes: Sizes) -> Iterator[Product]:
    """The weights of a layer as they are merged, and the head: alone, and fused with what stands around them.

    In the graphs of ranks, messages take up the norms.
    """
    divided = isinstance(sizes, Published) and sizes.ranks > 1
    hidden, inner, dim = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    heads = sizes.num_heads * dim
    for name, fused, out, width in (
        ("qkv", "scaled_linear", heads + 2 * sizes.num_kv_heads * dim, hidden),
        ("o", "linear_add", hidden, heads),
        ("gate_up", "linear_silu_mul" if divided else "scaled_linear_silu_mul", 2 * inner, hidden),
        ("down", "linear_add", hidden, inner),
        ("lm_head", "scaled_linear", sizes.vocab_size, hidden),
    ):
        for operation in ("linear",) if divided and name != "gate_up" else ("linear", fused):
            yield Product(model, name, operation, out, width)
