"""Operations by one table each: what follows from a row alone, with the same bits in any company; gradients; costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import strata.comm.experts.rows
import strata.comm.operations
import strata.comm.reduced_norm
import strata.models.families  # noqa: F401  (every operation of a model)
from strata.graph import fuse, fuse_products, fuse_rounding  # noqa: F401  (and of its passes)
from strata.graph.ranks import shard_keys  # noqa: F401
from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import Clamp
from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.moe import count, experts  # noqa: F401
from strata.kernels.moe.route import SOFTMAX, ExpertChoice
from strata.kernels.op import OPERATIONS
from strata.kernels.quant.quantized import pack
from strata.kernels.quant.schemes import SCHEMES
from strata.kernels.state.paged import PagedKV
from tests.kernels.launches.noted import empty as meta

DTYPES = [torch.float32, torch.bfloat16]
CLAMP, SIGMOIDS = Clamp(1.702, 0.7), ExpertChoice("sigmoid", 4, 2, "top2", 2.5)
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
    "quantized_linear": (
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
    "sharded_gated_rms_norm": ((X, X + 1, some(ROWS, 4).square()), (2, FACTOR, 1e-5)),
    "sharded_rms_norm": ((X, some(ROWS, 4).square()), (2, FACTOR, 1e-5, 0.0)),
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
    "linear_add": ((X,), (WEIGHT, BIAS, some(ROWS, 2 * WIDTH), BIAS)),
}


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_these_are_all_that_are_said_to_be_rowwise() -> None:
    assert {name for name, one in OPERATIONS.items() if one.rowwise} == {
        *ROWWISE,
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
    # A residual, which stands among what follows, has rows, too.
    own = [
        one[kept] if name == "linear_add" and isinstance(one, Tensor) and len(one) == ROWS else one for one in others
    ]
    whole = OPERATIONS[name].reference(*activations, *others)
    part = OPERATIONS[name].reference(*(one[kept] for one in activations), *own)
    for one, other in zip(outputs(part), outputs(whole), strict=True):
        torch.testing.assert_close(one, other[kept])


@pytest.mark.parametrize("name", ROWWISE)
def test_meta_results_have_the_shape_and_dtype_of_real_ones(name: str) -> None:
    given = [*ROWWISE[name][0], *ROWWISE[name][1]]
    empty = OPERATIONS[name](*pytree.tree_map_only(Tensor, lambda one: one.to("meta"), given))
    for promised, real in zip(outputs(empty), outputs(OPERATIONS[name].reference(*given)), strict=True):
        assert promised.is_meta
        assert (promised.shape, promised.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("name", [name for name, one in OPERATIONS.items() if one.product])
def test_products_are_of_the_first_two_arguments(name: str) -> None:
    extra = (True,) if name.endswith("_fp8") else ()
    product, found = F.linear(X, WEIGHT, BIAS), OPERATIONS[name].reference(X, WEIGHT, BIAS, *extra)
    if OPERATIONS[name].gated:
        product = F.silu(product[:, :WIDTH]) * product[:, WIDTH:]
    # 8 bits keep three binary digits of each operand.
    torch.testing.assert_close(found, product, rtol=1e-5, atol=2.0 if extra else 1e-5)


MANY = 300


def invariant(width: int, dtype: torch.dtype) -> dict[str, tuple[tuple[Tensor, ...], tuple[Any, ...]]]:
    """Rows of deterministic mode, and what follows them; half of each are parts of wider rows."""
    x, up = (torch.randn(MANY, width + 7).to(dtype)[:, 3 : 3 + width] for _ in range(2))
    weight, total = torch.randn(width).to(dtype), torch.rand(MANY, 4)
    matrix, bias = torch.randn(96, width).to(dtype), torch.randn(96).to(dtype)
    logits, heads = torch.randn(MANY, 12), torch.randn(MANY, 8 * width).to(dtype).view(MANY, 8, width)
    angles = OPERATIONS["rope_angles"].bind("cpu", deterministic=True)(torch.arange(MANY).int(), torch.randn(MANY, 16))
    even = width % 16 == 0
    return {
        "rms_norm": ((x,), (weight, 1e-5)),
        "add_rms_norm": ((x, up), (weight, 1e-5)),
        "wide_rms_norm": ((x,), (weight, 1e-5, 1.0)),
        "gated_rms_norm": ((x, up), (weight, 1e-5, width, True)),
        "mean_square": ((x,), ()),
        "gated_mean_square": ((x, up), ()),
        "sharded_gated_rms_norm": ((x, up, total), (2, weight, 1e-5)),
        "silu_mul": ((x, up), ()),
        "gelu_mul": ((x, up), ()),
        "clamped_swiglu": ((x, up), (CLAMP,)),
        "sigmoid_gate": ((x, up[:, :1]), ()),
        "softcap": ((x,), (3.0,)),
        "linear": ((x,), (matrix, bias)),
        "route": ((logits,), (torch.randn(12), 3, True, SIGMOIDS if even else SOFTMAX)),
        "token_logprobs": ((torch.randn(MANY, 4099), torch.randint(0, 4099, (MANY, 3))), ()),
        "gumbel_sample": (
            (
                torch.randn(MANY, 1001),
                torch.arange(MANY) % 3 / 2,
                torch.randint(-(2**63), 2**63 - 1, (MANY,)),
                torch.arange(MANY),
            ),
            (),
        ),
        **({"rope": ((heads[..., :16], *angles), ())} if even else {}),
    }


def assert_rows_stand_alone(run: Callable[[Tensor], Any]) -> None:
    """`run` takes the indices of rows; their results must be those they have among all rows."""
    together = outputs(run(torch.arange(MANY)))
    for size in (1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 100, 257):
        chosen = torch.randint(0, MANY, (size,))
        for alone, all_rows in zip(outputs(run(chosen)), together, strict=True):
            assert torch.equal(alone, all_rows[chosen]), f"rows differ in a batch of {size}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 255, 768, 1003])
@pytest.mark.parametrize("name", invariant(16, torch.float32))
def test_rows_have_the_same_bits_in_any_company(name: str, width: int, dtype: torch.dtype) -> None:
    calls = invariant(width, dtype)
    if name not in calls:
        return
    rows, others = calls[name]
    run = OPERATIONS[name].bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda chosen: run(*(one[chosen] for one in rows), *others))
    whole, apart = run(*rows, *others), run(*(one.contiguous() for one in rows), *others)
    assert all(map(torch.equal, outputs(whole), outputs(apart)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(256, 768), (255, 4099), (64, 1), (30, 6)])
def test_rows_of_products_have_the_same_bits_in_any_company(width: int, out: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(MANY, width).to(dtype), torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    run = OPERATIONS["linear"].bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(x[rows], weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_rotated_heads_have_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x, table, weight = torch.randn(MANY, 192).to(dtype), torch.randn(MANY, 24), torch.randn(24).to(dtype)
    angles, heads = (OPERATIONS[one].bind("cpu", deterministic=True) for one in ("rope_angles", "qk_rope_kv_write"))
    spec = HeadsSpec(0, 4, 2, 1e-5)
    assert_rows_stand_alone(lambda rows: heads(x[rows], weight, weight, *angles(rows.int(), table), None, spec))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_operation_of_a_model_has_an_invariant_implementation(device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    for name in (
        *("embedding", "vocabulary_embedding", "rms_norm", "linear", "silu_mul", "rope_angles", "rope", "kv_write"),
        *("gumbel_sample", "add_rms_norm", "qk_rope_kv_write"),
    ):
        assert OPERATIONS[name].bind(device, deterministic=True).candidates, name


POSITIONS, TABLE = torch.tensor([2, 0, 1], dtype=torch.int32), some(4, 6).double()
ANGLES = OPERATIONS["rope_angles"].reference(POSITIONS, TABLE)
# What is called with the operation and tensors of these shapes.
GRADIENTS: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    ("rms_norm", lambda run, x, w: run(x, w, 1e-5), ((3, 5), (5,))),
    ("linear", lambda run, *given: run(*given), ((3, 5), (4, 5), (4,))),
    ("silu_mul", lambda run, *given: run(*given), ((3, 5), (3, 5))),
    ("rope", lambda run, x: run(x, *ANGLES), ((3, 2, 6),)),
    ("embedding", lambda run, w: run(POSITIONS, w), ((4, 5),)),
    ("wide_rms_norm", lambda run, x, w: run(x, w, 1e-5, 1.0), ((3, 5), (5,))),
    ("sharded_rms_norm", lambda run, x, w: run(x, x.square().mean(-1, keepdim=True), 1, w, 1e-5, 1.0), ((3, 5), (5,))),
    ("mean_square", lambda run, x: run(x), ((3, 5),)),
    ("gelu_mul", lambda run, *given: run(*given), ((3, 5), (3, 5))),
    ("clamped_swiglu", lambda run, *given: run(*given, CLAMP), ((3, 5), (3, 5))),
    ("sigmoid_gate", lambda run, *given: run(*given), ((3, 5), (3, 5))),
    ("sigmoid_gate", lambda run, *given: run(*given), ((3, 5), (3, 1))),
    ("deinterleave", lambda run, x: run(x, (1, 3)), ((3, 2, 4),)),
    ("scale", lambda run, x: run(x, 3.0), ((3, 5),)),
    ("softcap", lambda run, x: run(x, 2.0), ((3, 5),)),
    ("partial_rope", lambda run, x: run(x, *ANGLES), ((3, 2, 8),)),
    ("add_rms_norm", lambda run, x, y, w: run(x, y, w, 1e-5), ((3, 5), (3, 5), (5,))),
    (
        "qk_rope_kv_write",
        lambda run, *given: run(*given, *ANGLES, None, HeadsSpec(0, 2, 1, 1e-5)),
        ((3, 24), (6,), (6,)),
    ),
    ("gated_rms_norm", lambda run, *given: run(*given, 1e-5, 4, True), ((3, 8), (3, 8), (8,))),
    ("gated_rms_norm", lambda run, *given: run(*given, 1e-5, 4, False), ((3, 8), (3, 8), (8,))),
    ("route", lambda run, x: run(x, some(8), 3, True, SIGMOIDS)[0], ((3, 8),)),
]


@pytest.mark.parametrize(("name", "call", "shapes"), GRADIENTS, ids=[name for name, *_ in GRADIENTS])
def test_gradients_are_those_of_finite_differences(
    name: str, call: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *leaves: call(OPERATIONS[name], *leaves), given)


def wide(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def ids(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def pages(kv_heads: int, head_dim: int) -> PagedKV:
    pool = (meta(9, 16, kv_heads, head_dim),)
    return PagedKV(pool, pool, ids(1, 9), ids(7), ids(7))


def heads(*, normed: bool, paged: bool) -> tuple[Any, ...]:
    """Seven tokens of 4 query heads and 2 KV heads of 16 elements."""
    weight, angles = meta(16) if normed else None, wide(7, 1, 16)
    return meta(7, 128), weight, weight, angles, angles, pages(2, 16) if paged else None, HeadsSpec(0, 4, 2, 1e-5)


ROTATED, VALUES, FEW = 7 * 6 * 16 * 2, 7 * 2 * 16 * 2, 7 * 16 * 4 + 7 * 4  # the last: angles and slots
SCALED = (meta(7, 64), wide(7, 3), 1e-5, meta(48, 64), meta(48))
OF_EXPERT = 2 * (32 * 64 + 64 * 16 + 32 + 64)
# Seven tokens; two bytes an element, four an index or an angle.
HAND_COUNTS: list[tuple[str, tuple[Any, ...], Cost]] = [
    ("embedding", (ids(7), meta(100, 64)), Cost(0, 7 * 4 + 7 * 128, 7 * 128, 7 * 128)),
    # No more rows are read than there are.
    ("embedding", (ids(7), meta(5, 64)), Cost(0, 7 * 4 + 5 * 128, 7 * 128, 5 * 128)),
    ("vocabulary_embedding", (ids(7), meta(50, 64), 50), Cost(0, 28 + 7 * 128, 7 * 128, 7 * 128)),
    ("rms_norm", (meta(7, 64), meta(64), 1e-5), Cost(7 * 64 * 4, 7 * 128 + 128, 7 * 128, 128)),
    ("linear", (meta(7, 64), meta(96, 64), None), Cost(7 * 64 * 96 * 2, 896 + 12288, 7 * 192, 12288)),
    ("linear", (meta(7, 64), meta(96, 64), meta(96)), Cost(86016 + 672, 896 + 12288 + 192, 7 * 192, 12288 + 192)),
    ("silu_mul", (meta(7, 64), meta(7, 64)), Cost(7 * 64 * 5, 2 * 896, 896)),
    # Eight signs a token are changed; 16 angles a token are read, and written twice.
    ("rope_angles", (ids(7), wide(50, 16)), Cost(7 * 8, 28 + 448, 896)),
    ("rope", (meta(7, 4, 16), wide(7, 1, 16), wide(7, 1, 16)), Cost(1344, 896 + 448, 896)),
    ("kv_write", (meta(7, 8, 128), meta(7, 8, 128), pages(8, 128), 0), Cost(0, 2 * 14336 + 28, 2 * 14336)),
    ("kv_write", (meta(7, 8, 128), meta(7, 8, 128), None, 0), Cost()),
    ("add_rms_norm", (meta(7, 64), meta(7, 64), meta(64), 1e-5), Cost(7 * 64 * 5, 2 * 896 + 128, 2 * 896, 128)),
    ("qk_rope_kv_write", heads(normed=False, paged=False), Cost(672 * 3, ROTATED + 7 * 16 * 4, ROTATED)),
    (
        "qk_rope_kv_write",
        heads(normed=False, paged=True),
        Cost(672 * 3, ROTATED + VALUES + FEW, ROTATED + 2 * VALUES),
    ),
    (
        "qk_rope_kv_write",
        heads(normed=True, paged=True),
        Cost(672 * 7, ROTATED + VALUES + FEW + 64, ROTATED + 2 * VALUES, 64),
    ),
    ("wide_rms_norm", (meta(7, 64), meta(64), 1e-5, 1.0), Cost(7 * 64 * 4, 7 * 128 + 128, 7 * 128, 128)),
    ("gated_rms_norm", (meta(7, 64), meta(7, 64), meta(64), 1e-5, 16, True), Cost(9 * 448, 2 * 896 + 128, 896, 128)),
    ("gated_mean_square", (meta(7, 64), meta(7, 64)), Cost(7 * 7 * 64, 2 * 896, 7 * 16)),
    (
        "sharded_gated_rms_norm",
        (meta(7, 64), meta(7, 64), wide(7, 4), 2, meta(64), 1e-5),
        Cost(7 * 64 * 7, 2 * 896 + 7 * 16 + 128, 896, 128),
    ),
    ("mean_square", (meta(7, 64),), Cost(2 * 7 * 64, 7 * 128, 7 * 16)),
    ("gelu_mul", (meta(7, 64), meta(7, 64)), Cost(7 * 64 * 9, 2 * 896, 896)),
    ("clamped_swiglu", (meta(7, 64), meta(7, 64), CLAMP), Cost(7 * 64 * 11, 2 * 896, 896)),
    (
        "biased_experts",
        # Seven tokens with one expert of one: three products of 14 rows, biases, activation, weighted sum.
        (
            *(meta(7, 64), wide(7, 1), meta(7, 1, dtype=torch.int64)),
            *(meta(1, 32, 64), meta(1, 64, 16), meta(1, 32), meta(1, 64), CLAMP),
        ),
        Cost(
            7 * (3 * 2 * 64 * 16 + 32 + 64 + 11 * 16 + 2 * 64),
            7 * 128 + 7 * 4 + 7 * 8 + OF_EXPERT,
            7 * 128,
            OF_EXPERT,
        ),
    ),
    ("scale", (meta(7, 64), 8.0), Cost(7 * 64, 896, 896)),
    ("sigmoid_gate", (meta(7, 4, 16), meta(7, 4, 16)), Cost(7 * 64 * 5, 2 * 896, 896)),
    ("sigmoid_gate", (meta(7, 64), meta(7, 1)), Cost(7 * 64 + 7 * 4, 896 + 14, 896)),
    ("deinterleave", (meta(7, 4, 16), (5, 11)), Cost(0, 896, 896)),
    # Eight of 16 dimensions are rotated, by eight angles a token.
    ("partial_rope", (meta(7, 4, 16), wide(7, 1, 8), wide(7, 1, 8)), Cost(3 * 7 * 4 * 8, 896 + 224, 896)),
    # Of each element: bias, residual, the norm's weight, a square and its addition.
    (
        "linear_add",
        (meta(7, 64), meta(48, 64), meta(48), meta(7, 48), meta(48)),
        Cost(43008 + 5 * 336, 896 + 672 + 6144 + 192, 2 * 672 + 28, 6144 + 192),
    ),
    ("scaled_linear", SCALED, Cost(43008 + 2 * 336, 896 + 84 + 6144 + 96, 672, 6144 + 96)),
    # Scale and bias for both halves, five operations for each element of the result.
    ("scaled_linear_silu_mul", SCALED, Cost(43008 + 2 * 336 + 5 * 168, 896 + 84 + 6144 + 96, 336, 6144 + 96)),
    ("linear_silu_mul", (meta(7, 64), meta(96, 64), None), Cost(86016 + 5 * 336, 896 + 12288, 672, 12288)),
    (
        "linear_silu_mul",
        (meta(7, 64), meta(96, 64), meta(96)),
        Cost(86016 + 672 + 5 * 336, 896 + 12480, 672, 12480),
    ),
    ("sliced_linear", (meta(7, 64), meta(96, 64), 8, True), Cost(86016 + 7 * 672, 896 + 12288, 2688, 12288)),
    ("sliced_linear", (meta(7, 64), meta(96, 64), 8, False), Cost(86016 + 7 * 672, 896 + 12288, 1344, 12288)),
    # Scores, two comparisons each for groups, sum, division, scale.
    ("route", (meta(7, 8), None, 2, True, SIGMOIDS), Cost(7 * (32 + 16 + 4 + 2), 7 * 16, 7 * 2 * 12)),
    ("wide_linear", (meta(7, 64), meta(6, 64)), Cost(2 * 7 * 64 * 6, 896 + 6 * 128, 7 * 6 * 4, 6 * 128)),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), HAND_COUNTS, ids=[name for name, *_ in HAND_COUNTS])
def test_costs_are_the_hand_counts(name: str, arguments: tuple[Any, ...], expected: Cost) -> None:
    assert OPERATIONS[name].cost(*arguments, workload=Workload((7,), (7,))) == expected
