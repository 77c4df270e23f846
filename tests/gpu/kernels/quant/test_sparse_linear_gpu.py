"""Products by weights of 2:4 sparsity on CUDA against float64 over the dense weight: every way, tile and ending."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strata import LLM, SamplingParams
from strata.hardware.replay import time_replayed
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.linear import linear
from strata.kernels.linear.packed.few_rows import (
    IMPLEMENTATION,
    PackedProduct,
    dot_shapes,
    dot_tiles,
    multiply,
    packed_tile,
)
from strata.kernels.linear.prenorm import linear_add, scaled_linear, scaled_linear_silu_mul
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.linear.skinny_tiles import SkinnyTile
from strata.kernels.quant.expand import can_expand, expand_on_device
from strata.kernels.quant.packed import PackedWeight, pack
from strata.kernels.quant.schemes import SPARSITIES
from strata.kernels.quant.two_of_four import least_two_of_four
from strata.kernels.split_counters import split_counters
from strata.models.folder import BUILTIN_FOLDER
from strata.models.pruned.prune import prune
from strata.models.pruned.settings import Pruning
from tests.gpu.tensors import assert_near, draw, exact_linear

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

EPS = 1e-5
HALVES = (torch.bfloat16, torch.float16)


def draw_sparse(out: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, PackedWeight]:
    """Dense and compressed; some fours have one value or none."""
    weight = draw(out, width, dtype=dtype) * width**-0.5
    weight = weight.masked_fill(least_two_of_four(weight.abs()), 0.0)
    weight[:, : width // 8].masked_fill_(torch.rand(out, width // 8, device="cuda") < 0.5, 0.0)
    return weight, pack(weight, SPARSITIES["2:4"])


def tiles(rows: int, weight: PackedWeight) -> list[SkinnyTile]:
    """That of the rule, and of each shape that it may choose the one with most splits."""
    asked = (rows, *weight.shape, weight.kind, 0)
    limits = DeviceLimits.of(weight.device)
    found = [packed_tile(*asked, limits)]
    found += [tile for shape in dot_shapes(rows) for tile in dot_tiles(shape, *asked)[-1:]]
    return [tile for tile in found if tile is not None]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("out", "width", "several"), [(1008, 2048, (1, 3, 16, 200)), (33, 4096, (2, 30)), (4096, 14336, (1, 64))]
)
def test_few_rows_in_every_shape_of_tile(dtype: torch.dtype, out: int, width: int, several: tuple[int, ...]) -> None:
    (plain, weight), bias = draw_sparse(out, width, dtype), draw(out, dtype=dtype)
    for rows in several:
        x = draw(rows, 2 * width, dtype=dtype)[:, width:]
        exact = exact_linear(x, plain, bias)
        assert linear.bind("cuda", packed=True).choose(x, weight, bias).name == IMPLEMENTATION
        found = tiles(rows, weight)
        assert found
        for tile in found:
            (result,) = multiply(PackedProduct(x, weight, bias), tile)
            assert_near(result, exact)
            assert torch.equal(multiply(PackedProduct(x, weight, bias), tile)[0], result)
    assert not split_counters(bias.device).any()


@pytest.mark.parametrize("rows", [1, 3, 16, 50, 256, 300])
def test_what_products_end_in(rows: int) -> None:
    """By the registry: a residual and a norm, a norm's scale, gates; 300 rows in parts."""
    hidden, inner = 1024, 1536
    x, residual, norm_weight = draw(rows, inner), draw(rows, hidden + 24)[:, 8 : hidden + 8], draw(hidden)
    (down, packed_down), (both, gate_up) = draw_sparse(hidden, inner), draw_sparse(2 * inner, hidden)
    bias, few = draw(2 * inner), rows <= 256
    total, weighted, squares = linear_add(x, packed_down, None, residual, norm_weight)
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    if few:
        assert_near(total, exact_linear(x, down) + residual.double())
        assert torch.equal(weighted, total * norm_weight)
    else:
        torch.testing.assert_close(total.double(), exact_linear(x, down) + residual.double(), **tolerance)
    scale = torch.rsqrt(squares.double().sum(-1, keepdim=True) / hidden + EPS)
    exact = exact_linear(weighted, both) * scale + bias.double()
    plain = exact_linear(weighted, both, bias)
    gated, alone = (F.silu(one[:, :inner]) * one[:, inner:] for one in (exact, plain))
    for found, wanted in (
        (scaled_linear(weighted, squares, EPS, gate_up, bias), exact),
        (scaled_linear_silu_mul(weighted, squares, EPS, gate_up, bias), gated),
        (linear_silu_mul(weighted, gate_up, bias), alone),
    ):
        if few:
            assert_near(found, wanted)
        else:
            assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("out", "width"), [(1, 8), (33, 264), (1000, 1056), (4096, 14336)])
def test_expanded_weights_are_the_dense_ones_to_the_bit(dtype: torch.dtype, out: int, width: int) -> None:
    plain, weight = draw_sparse(out, width, dtype)
    assert can_expand(weight)
    assert torch.equal(expand_on_device(weight), plain)


@pytest.mark.parametrize(("rows", "out", "width"), [(257, 1024, 3072), (1000, 272, 1040), (32769, 512, 1024)])
def test_many_rows_over_the_dense_weight(rows: int, out: int, width: int) -> None:
    (plain, weight), x, bias = draw_sparse(out, width), draw(rows, width), draw(out)
    chosen = linear.bind("cuda", packed=True).choose(x, weight, bias)
    assert chosen.name == "2:4 expanded, cublas"
    assert torch.equal(chosen.run(x, weight, bias), F.linear(x, plain, bias))


@pytest.mark.parametrize("rows", [1, 300, 4096])
def test_a_recorded_chain_reads_what_the_launch_before_wrote(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # to poison the results would put kernels between the launches
    weights, x = [draw_sparse(2048, 2048)[1] for _ in range(3)], draw(rows, 2048)
    run: Callable[..., Tensor] = linear.bind("cuda", packed=True)
    eager = x
    for weight in weights:
        eager = run(eager, weight, None)
        torch.cuda.synchronize()
    results: list[Tensor] = []

    def chain() -> None:
        last = x
        for weight in weights:
            last = run(last, weight, None)
        results.append(last)

    time_replayed([chain], repeats=20)
    for result in (results[0], results[-1]):
        assert torch.equal(result, eager)


def test_an_engine_says_what_it_says_with_the_zeros(tmp_path: Path) -> None:
    """Prompts in one step and in chunks, and decodes: the likelihoods of what it reads and writes, to a rounding."""
    prune(BUILTIN_FOLDER, tmp_path / "pruned", Pruning.of("2:4", 0.5, "magnitude"), [], torch.device("cpu"))
    said = []
    for sparsity in (None, "2:4"):
        llm = LLM(tmp_path / "pruned", sparsity=sparsity, dtype="bfloat16", max_num_seqs=4, verbose=False)
        prompt = llm.get_tokenizer().encode("What is 47 + 38? " * 12)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        logprobs = [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]
        said.append(torch.tensor(logprobs))
        assert len(output.outputs[0].token_ids) == 8
        del llm
        gc.collect()
    assert (said[0] - said[1]).abs().mean() < 0.1
    assert said[0].std() > 1


def test_bits_of_rows_in_any_company() -> None:
    (plain, weight), x = draw_sparse(520, 1024), draw(300, 1024)
    bound = linear.bind("cuda", deterministic=True, packed=True)
    together, exact = bound(x, weight, None), exact_linear(x, plain)
    assert (together.double() - exact).norm() <= 5e-3 * exact.norm()
    for rows in (1, 2, 65, 129):
        assert torch.equal(bound(x[:rows], weight, None), together[:rows])


def test_what_kernels_cannot_read_is_served_in_floats() -> None:
    """Widths that fill no block, another type, leading dimensions, no rows."""
    for width, dtype in ((104, torch.bfloat16), (1024, torch.float32)):
        plain, weight = draw_sparse(40, width, dtype)
        x = draw(3, 5, width, dtype=dtype)
        exact = exact_linear(x, plain)
        assert (linear(x, weight, None).double() - exact).norm() <= 1e-2 * exact.norm()
        assert linear(x[:0], weight, None).shape == (0, 5, 40)
