"""Products by cuBLASLt: right, and the same bits for a row in any company; and by the algorithms that were measured."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from strata.kernels import tuned
from strata.kernels.linear import cublaslt
from strata.kernels.linear.cublaslt import IMPLEMENTATION
from strata.kernels.linear.linear import linear
from strata.kernels.linear.measured_algorithms import MeasuredAlgorithm
from strata.kernels.tuned import Key
from tests.gpu.tensors import assert_near, captured, draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

# [out, width] of the merged weights of Llama-3.1-8B, Qwen3-0.6B, and Qwen2.5-1.5B and 0.5B (whose queries, keys and
# values have a bias; those of 0.5B are a small weight, which cuBLASLt does not get).
LAYERS = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B head": (128256, 4096),
    "0.6B qkv": (4096, 1024),
    "0.6B o": (1024, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B head": (151936, 1024),
    "1.5B qkv": (2048, 1536),
    "0.5B gate_up": (9728, 896),
    "0.5B down": (896, 4864),
}
MAX_ROWS = 8192
COUNTS = [*range(1, 36), 47, 48, 49, 63, 64, 65, 96, 100, 127, 128, 129, 160, 200, 255, 256, 257, 300, 384, 511, 512]
COUNTS += [513, 700, 1000, 1023, 1024, 1025, 1536, 2047, 2048, 3000, 4095, 4096, 4097, 6000, 8191]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products by cuBLASLt are for Hopper GPUs")


def weight_of(layer: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out, width = LAYERS[layer]
    return draw(out, width, dtype=dtype) / width**0.5


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bound = linear.bind("cuda", deterministic=True)
    assert bound.choose(x, weight, bias).name == IMPLEMENTATION
    return bound(x, weight, bias)


def assert_same_rows(found: Tensor, wanted: Tensor, message: str) -> None:
    differ = (found != wanted).any(-1).sum().item()
    assert differ == 0, f"{message}: {differ} rows of {len(found)} have other bits"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_row_has_the_same_bits_in_any_batch(layer: str) -> None:
    weight = weight_of(layer)
    x = draw(MAX_ROWS, weight.shape[1])
    together = run(x, weight)
    different = []
    for count in COUNTS:
        first = torch.randint(0, MAX_ROWS - count + 1, ()).item()
        rows = slice(first, first + count)
        if not torch.equal(run(x[rows], weight), together[rows]):
            different.append(count)
    assert not different, f"other bits than among {MAX_ROWS} rows for these numbers of rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", ["8B o", "8B down", "0.6B o", "1.5B qkv", "0.5B down"])
def test_the_product(layer: str, dtype: torch.dtype) -> None:
    weight = weight_of(layer, dtype)
    out, width = weight.shape
    for rows in (1, 2, 31, 64, 65, 1000):
        x, bias = draw(rows, width, dtype=dtype), draw(out, dtype=dtype)
        for shift in (None, bias):
            exact = x.double() @ weight.double().t() + (0 if shift is None else shift.double())
            # A sum of `width` products in float32 loses a little in each addition.
            loss = {"rtol": torch.finfo(dtype).eps, "atol": 2e-6 * width**0.5}
            torch.testing.assert_close(run(x, weight, shift).double(), exact, **loss)


def test_a_bias_does_not_change_that() -> None:
    weight = weight_of("1.5B qkv")
    x, bias = draw(MAX_ROWS, weight.shape[1]), draw(len(weight))
    together = run(x, weight, bias)
    for count in COUNTS:
        assert_same_rows(run(x[:count], weight, bias), together[:count], f"{count} rows")


@pytest.mark.parametrize("layer", ["8B o", "0.6B down"])
def test_nor_does_how_the_rows_lie(layer: str) -> None:
    weight = weight_of(layer)
    width = weight.shape[1]
    for count in (1, 3, 64, 300):
        x = draw(count, width)
        together = run(x, weight)
        for shift, gap in ((8, 24), (3, 5), (0, width), (1, 0)):
            wide = draw(count, shift + width + gap)
            wide[:, shift : shift + width] = x
            sliced = wide[:, shift : shift + width]
            assert_same_rows(run(sliced, weight), together, f"{count} rows at {shift} of {wide.shape[1]}")
        assert_same_rows(run(x.unsqueeze(1), weight).squeeze(1), together, "three dimensions")


def test_no_rows() -> None:
    assert run(draw(0, 4096), weight_of("8B o")).shape == (0, 4096)


def test_a_cuda_graph_replays_it() -> None:
    weight, bias = weight_of("1.5B qkv"), draw(2048)
    x = draw(17, 1536)
    graph, result = captured(lambda: run(x, weight, bias))
    other = draw(17, 1536)
    x.copy_(other)
    graph.replay()
    assert_same_rows(result, run(other, weight, bias), "replayed")


def test_another_stream() -> None:
    weight, x = weight_of("8B o"), draw(100, 4096)
    together = run(x, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.mul_(2)
        result = run(x, weight)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_rows(result, together * 2, "powers of two change no bits but the exponent's")


MEASURED_IMPLEMENTATION = "cublaslt measured"


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


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x.double() @ part.double().t() for part in weight.split(16384)], 1)


def test_every_entry_in_and_outside_a_cuda_graph(entries: dict[tuple[int, int], list[Key]]) -> None:
    bound = linear.bind("cuda")
    for (out, width), keys in entries.items():
        weight = draw(out, width)
        for key in keys:
            x, other = draw(key.rows, width), draw(key.rows, width)
            assert bound.choose(x, weight, None).name == MEASURED_IMPLEMENTATION, key
            assert_near(bound(x, weight, None), exact_product(x, weight), 5e-5)
            graph, result = captured(partial(bound, x, weight, None))
            x.copy_(other)
            graph.replay()
            assert_near(result, exact_product(other, weight), 5e-5)


def test_every_number_of_rows_that_steps_are_recorded_for(entries: dict[tuple[int, int], list[Key]]) -> None:
    bound, served = linear.bind("cuda"), 0
    for (out, width), _ in entries.items():
        weight, x = draw(out, width), draw(1024, width)
        exact = exact_product(x, weight)
        for rows in (*range(64, 256, 16), *range(256, 1025, 32), 65, 97, 201, 333, 1023):
            if bound.choose(x[:rows], weight, None).name == MEASURED_IMPLEMENTATION:
                assert_near(bound(x[:rows], weight, None), exact[:rows], 5e-5)
                served += 1
    assert served > len(entries)


def test_deterministic_mode_and_training_keep_theirs(entries: dict[tuple[int, int], list[Key]]) -> None:
    for (out, width), keys in entries.items():
        x, weight = draw(keys[0].rows, width), draw(out, width)
        assert linear.bind("cuda", deterministic=True).choose(x, weight, None).name == cublaslt.IMPLEMENTATION
        assert linear.bind("cuda", differentiable=True).choose(x, weight, None).name == "cublas"
