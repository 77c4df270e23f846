"""Rows that are rounded where they are made, on CUDA: the bits of the operations one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.activation.rounded_silu_mul import silu_mul_round
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear.linear import linear
from strata.kernels.linear.rounded_linear import rounded_linear
from strata.kernels.norm.norm import add_rms_norm, rms_norm
from strata.kernels.norm.rounded_norm import add_rms_norm_round, rms_norm_round, wide_rms_norm_round
from strata.kernels.norm.wide_norm import wide_rms_norm
from strata.kernels.op import Operation
from strata.kernels.quant.packed import pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

EPS = 1e-5
# Kind, columns that share a scale, and one for all rows.
WAYS = [
    ("e4m3", 0, None), ("int8", 0, None), ("e4m3", 128, None), ("int8", 128, None), ("e4m3", 0, 0.01), ("int8", 0, 0.02)
]  # fmt: skip


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def run(operation: Operation, *arguments: Any) -> Any:
    return operation.bind("cuda", deterministic=True)(*arguments)


def assert_identical(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("kind", "columns", "static"), WAYS)
@pytest.mark.parametrize("width", [64, 200, 1024, 4096, 5000, 14336, 16384, 28672])
def test_fused_kernels_have_the_bits_of_their_parts(width: int, kind: str, columns: int, static: float | None) -> None:
    for rows in (1, 65, 300):
        left, right = draw(rows, 2 * width + 16)[:, 16:].split(width, 1)
        gated = run(round_rows, run(silu_mul, left, right), kind, columns, static)
        assert_identical(run(silu_mul_round, left, right, kind, columns, static), gated)
        if width > 16384 or width < columns:
            continue
        weight = draw(width)
        assert rms_norm_round.bind("cuda").choose(left, weight, EPS, kind, columns, True, static).name == "triton"
        normed = run(rms_norm, left, weight, EPS)
        rounded = run(round_rows, normed, kind, columns, static)
        assert_identical(run(rms_norm_round, left, weight, EPS, kind, columns, False, static), rounded)
        assert_identical(run(rms_norm_round, left, weight, EPS, kind, columns, True, static), (*rounded, normed))
        wide = run(wide_rms_norm, left, weight, EPS, 1.0)
        found = run(wide_rms_norm_round, left, weight, EPS, 1.0, kind, columns, True, static)
        assert_identical(found, (*run(round_rows, wide, kind, columns, static), wide))
        total, normed = run(add_rms_norm, left, right, weight, EPS)
        rounded = run(round_rows, normed, kind, columns, static)
        found = run(add_rms_norm_round, left, right, weight, EPS, kind, columns, True, static)
        assert_identical(found, (total, *rounded, normed))
        found = run(add_rms_norm_round, left, right, weight, EPS, kind, columns, False, static)
        assert_identical(found, (total, *rounded))


@pytest.mark.parametrize("static", [None, 0.01])
def test_what_is_no_number_shows_in_its_row_alone(static: float | None) -> None:
    gate, up = draw(9, 4096), draw(9, 4096)
    gate[4, 77] = torch.nan
    for _, scales in (
        run(silu_mul_round, gate, up, "int8", 0, static),
        run(rms_norm_round, gate, up[0], EPS, "int8", 0, False, static),
        run(add_rms_norm_round, gate, up, up[0], EPS, "int8", 0, False, static)[1:],
    ):
        assert scales.isnan().flatten().tolist() == [row == 4 for row in range(9)]


@pytest.mark.parametrize(
    ("scheme", "static"), [("fp8", None), ("int8", None), ("fp8_block", None), ("fp8", 0.01), ("int8", 0.02)]
)
@pytest.mark.parametrize("rows", [65, 300, 2048])
def test_products_of_rounded_rows_have_the_bits_of_others(rows: int, scheme: str, static: float | None) -> None:
    weight = pack(torch.randn(1008, 2048) / 45, SCHEMES[scheme]).to("cuda")._replace(input_scale=static)
    x, bias = draw(rows, 2048), draw(1008)
    values, scales = run(round_rows, x, weight.kind, weight.columns, static)
    bound = rounded_linear.bind("cuda", packed=True)
    for added in (None, bias):
        chosen = bound.choose(values, scales, weight, added, x.dtype)
        assert chosen.name == linear.bind("cuda", packed=True).choose(x, weight, added).name
        found = chosen.run(*rounded_linear.given(values, scales, weight, added, x.dtype))
        assert torch.equal(found, linear.bind("cuda", packed=True)(x, weight, added))
