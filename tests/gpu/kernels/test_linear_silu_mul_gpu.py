"""The gated product of many rows against float64: rows and columns that fill no tile, strided rows, biases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.linear.silu_mul import linear_silu_mul

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

ROWS = thresholds_of(MEASURED).gated_rows


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [ROWS, ROWS + 77])
@pytest.mark.parametrize("inner", [8, 136, 520])
def test_against_float64(dtype: torch.dtype, rows: int, inner: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs the copy engine of a Hopper device")
    x = draw(rows, 640, dtype=dtype)[:, 32 : 32 + 600]
    weight, bias = draw(2 * inner, 600, dtype=dtype).div_(600**0.5), draw(2 * inner, dtype=dtype)
    for given in (None, bias):
        chosen = linear_silu_mul.bind("cuda").choose(x, weight, given)
        assert chosen.name == "triton"
        result = chosen.run(x, weight, given)
        gate, up = F.linear(x.double(), weight.double(), None if given is None else given.double()).chunk(2, 1)
        expected = F.silu(gate) * up
        assert result.isfinite().all()
        rtol = 0.55 * torch.finfo(dtype).eps
        torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=5e-5 * expected.abs().max().item())
