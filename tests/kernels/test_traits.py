"""The traits that operations declare: what passes rely on holds for what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import strata.comm.experts.rows
import strata.comm.operations
import strata.comm.reduced_norm
import strata.models.families  # noqa: F401  (every operation of a model)
from strata.graph import fuse_attention, fuse_products, fuse_rounding  # noqa: F401  (and of its passes)
from strata.graph.ranks import divide_keys  # noqa: F401
from strata.kernels.activation.clamped_swiglu import Clamp
from strata.kernels.linear import fp8, sliced  # noqa: F401
from strata.kernels.moe import count, experts  # noqa: F401
from strata.kernels.norm import divided_norm  # noqa: F401
from strata.kernels.op import OPERATIONS
from strata.kernels.quant.packed import pack
from strata.kernels.quant.schemes import SCHEMES

ROWS, WIDTH = 9, 16


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, WEIGHT, BIAS, FACTOR = some(ROWS, WIDTH), some(2 * WIDTH, WIDTH), some(2 * WIDTH), some(WIDTH)
CHOSEN = torch.arange(2 * ROWS).view(ROWS, 2) % 4
# The activations of each operation, of which rows can be left out, and what follows them.
ROWWISE: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "embedding": ((torch.arange(ROWS),), (some(ROWS, WIDTH),)),
    "vocabulary_embedding": ((torch.arange(ROWS),), (some(4, WIDTH), 3)),
    "rope_angles": ((torch.arange(ROWS).int(),), (some(ROWS, WIDTH),)),
    "rope": ((some(ROWS, 2, WIDTH), some(ROWS, 1, WIDTH), some(ROWS, 1, WIDTH)), ()),
    "rms_norm": ((X,), (FACTOR, 1e-5)),
    "add_rms_norm": ((X, X + 1), (FACTOR, 1e-5)),
    "linear": ((X,), (WEIGHT, BIAS)),
    "linear_silu_mul": ((X,), (WEIGHT, BIAS)),
    "sliced_linear": ((X,), (WEIGHT, 4, True)),
    "round_rows": ((X,), ("int8", 0)),
    "rms_norm_round": ((X,), (FACTOR, 1e-5, "int8", 0, True)),
    "add_rms_norm_round": ((X, X + 1), (FACTOR, 1e-5, "int8", 8, True)),
    "wide_rms_norm_round": ((X,), (FACTOR, 1e-5, 1.0, "int8", 0, False)),
    "silu_mul_round": ((X, X + 1), ("int8", 0)),
    "rounded_linear": (
        (X.to(torch.int8), X[:, :1].abs()),
        (pack(WEIGHT, SCHEMES["int8"]), BIAS, torch.float32),
    ),
    "scaled_linear": ((X, X.square()), (1e-5, WEIGHT, BIAS)),
    "scaled_linear_silu_mul": ((X, X.square()), (1e-5, WEIGHT, BIAS)),
    "silu_mul": ((X, X + 1), ()),
    "wide_rms_norm": ((X,), (FACTOR, 1e-5, 1.0)),
    "mean_square": ((X,), ()),
    "gated_rms_norm": ((X, X + 1), (FACTOR, 1e-5, 4, True)),
    "gated_mean_square": ((X, X + 1), ()),
    "divided_gated_rms_norm": ((X, X + 1, some(ROWS, 4).square()), (2, FACTOR, 1e-5)),
    "divided_rms_norm": ((X, some(ROWS, 4).square()), (2, FACTOR, 1e-5, 0.0)),
    "partial_rope": ((some(ROWS, 2, WIDTH), some(ROWS, 1, 8), some(ROWS, 1, 8)), ()),
    "tail_rope": ((some(ROWS, 2, WIDTH), some(ROWS, 1, 8), some(ROWS, 1, 8)), (True,)),
    "gelu_mul": ((X, X + 1), ()),
    "scale": ((X,), (3.0,)),
    "softcap": ((X,), (2.0,)),
    "times": ((X,), (0.22,)),
    "sigmoid_gate": ((X, X[:, :1] + 1), ()),
    "deinterleave": ((some(ROWS, 3, WIDTH),), ((5, 4, 7),)),
    "wide_linear": ((X,), (WEIGHT,)),
    "route": ((some(ROWS, 4),), (None, 2, True)),
    "experts": ((X, some(ROWS, 2), CHOSEN), (some(4, 8, WIDTH), some(4, WIDTH, 4))),
    "clamped_swiglu": ((X, X + 1), (Clamp(1.7, 0.5),)),
    "biased_experts": (
        (X, some(ROWS, 2), CHOSEN),
        (some(4, 8, WIDTH), some(4, WIDTH, 4), some(4, 8), some(4, WIDTH), Clamp(1.7, 0.5)),
    ),
    "count_choices": ((CHOSEN, torch.arange(ROWS).int()), (torch.zeros(1, 4, dtype=torch.int64), 0)),
    "absorb_queries": ((some(ROWS, 4, 10),), (some(4 * (6 + 5), 7), 5)),
    "expand_values": ((some(ROWS, 4, 7),), (some(4 * (6 + 5), 7), 5)),
    "local_experts": ((X, some(ROWS, 2), CHOSEN), (some(2, 8, WIDTH), some(2, WIDTH, 4), 1, 4)),
}


def test_these_are_all_that_are_said_to_be_rowwise() -> None:
    assert {name for name, one in OPERATIONS.items() if one.rowwise} == {
        *ROWWISE,
        "linear_add",
        "all_reduce",
        "all_gather",
        "pairwise_all_reduce",
        "all_reduce_add_rms_norm",
        "linear_all_reduce_add_rms_norm",
        "dispatch_rows",
        "combine_rows",
        "join_heads",
    }


@pytest.mark.parametrize("name", ROWWISE)
def test_a_row_of_the_result_follows_from_that_row_alone(name: str) -> None:
    activations, others = ROWWISE[name]
    kept = torch.tensor([7, 0, 3])
    whole = OPERATIONS[name].reference(*activations, *others)
    part = OPERATIONS[name].reference(*(one[kept] for one in activations), *others)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (part, whole)), strict=True):
        torch.testing.assert_close(one, other[kept])


def test_a_row_of_linear_add_follows_from_that_row_alone() -> None:
    residual, kept = some(ROWS, 2 * WIDTH), torch.tensor([7, 0, 3])
    run = OPERATIONS["linear_add"].reference
    whole, part = run(X, WEIGHT, BIAS, residual, BIAS), run(X[kept], WEIGHT, BIAS, residual[kept], BIAS)
    for one, other in zip(part, whole, strict=True):
        torch.testing.assert_close(one, other[kept])


@pytest.mark.parametrize("name", [name for name, one in OPERATIONS.items() if one.product])
def test_products_are_of_the_first_two_arguments(name: str) -> None:
    extra = (True,) if name.endswith("_fp8") else ()
    product, found = F.linear(X, WEIGHT, BIAS), OPERATIONS[name].reference(X, WEIGHT, BIAS, *extra)
    if OPERATIONS[name].gated:
        product = F.silu(product[:, :WIDTH]) * product[:, WIDTH:]
    # 8 bits keep three binary digits of each operand.
    torch.testing.assert_close(found, product, rtol=1e-5, atol=2.0 if extra else 1e-5)
