"""Products of a probe are products: against plain ones in float64."""

from __future__ import annotations

import pytest
import torch

from strata.hardware.probe.products import operands, precision, product

CPU = torch.device("cpu")


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 0)])
def test_products_by_dtype(dtype: str, close: float) -> None:
    torch.manual_seed(0)
    x, weight = operands(dtype, 24, 40, 64, CPU)
    assert (x.shape, weight.shape) == ((24, 64), (40, 64))
    found, right = product(dtype, CPU)(x, weight).double(), x.double() @ weight.double().t()
    assert (found - right).abs().max() <= close * right.abs().max()


def test_operands_are_random_so_that_they_take_the_power_of_real_ones() -> None:
    x, _ = operands("bfloat16", 64, 1, 64, CPU)
    assert 0.8 < x.float().std() < 1.2


def test_the_precision_of_float32_products_is_put_back() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with precision("tf32"):
        assert matmul.fp32_precision == "tf32"
    with precision("float32"):
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == before
