"""Products by the algorithms of cuBLASLt in the device's table: right for all rows that they serve, recorded or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.kernels import tuned
from strata.kernels.linear import cublaslt
from strata.kernels.linear.linear import linear
from strata.kernels.linear.measured_algorithms import MeasuredAlgorithm
from strata.kernels.tuned import Key

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
NAME = "cublaslt measured"


@pytest.fixture(scope="module")
def entries() -> dict[tuple[int, int], list[Key]]:
    """The entries of the table that this device's library can use, by weight."""
    found: dict[tuple[int, int], list[Key]] = {}
    for key, choice in tuned.read(torch.cuda.get_device_name()).items():
        known = choice.implementation == cublaslt.IMPLEMENTATION
        if known and MeasuredAlgorithm(**choice.parameters).version == cublaslt.version():
            found.setdefault((key.out, key.width), []).append(key)
    if not found:
        pytest.skip("no algorithms for this device and library")
    return found


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def assert_right(result: Tensor, exact: Tensor) -> None:
    """One rounding, beside what sums in float32 lose."""
    rtol = 0.55 * torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), exact.double(), rtol=rtol, atol=5e-5 * exact.abs().max().item())


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x.double() @ part.double().t() for part in weight.split(16384)], 1)


def test_every_entry_in_and_outside_a_cuda_graph(entries: dict[tuple[int, int], list[Key]]) -> None:
    bound = linear.bind("cuda")
    for (out, width), keys in entries.items():
        weight = draw(out, width)
        for key in keys:
            x, other = draw(key.rows, width), draw(key.rows, width)
            assert bound.choose(x, weight, None).name == NAME, key
            assert_right(bound(x, weight, None), exact_product(x, weight))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = bound(x, weight, None)
            x.copy_(other)
            graph.replay()
            assert_right(result, exact_product(other, weight))


def test_every_number_of_rows_that_steps_are_recorded_for(entries: dict[tuple[int, int], list[Key]]) -> None:
    bound, served = linear.bind("cuda"), 0
    for (out, width), _ in entries.items():
        weight, x = draw(out, width), draw(1024, width)
        exact = exact_product(x, weight)
        for rows in (*range(64, 256, 16), *range(256, 1025, 32), 65, 97, 201, 333, 1023):
            if bound.choose(x[:rows], weight, None).name == NAME:
                assert_right(bound(x[:rows], weight, None), exact[:rows])
                served += 1
    assert served > len(entries)


def test_deterministic_mode_and_training_keep_theirs(entries: dict[tuple[int, int], list[Key]]) -> None:
    for (out, width), keys in entries.items():
        x, weight = draw(keys[0].rows, width), draw(out, width)
        assert linear.bind("cuda", deterministic=True).choose(x, weight, None).name == cublaslt.IMPLEMENTATION
        assert linear.bind("cuda", differentiable=True).choose(x, weight, None).name == "cublas"
