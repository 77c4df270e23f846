"""On CPU the implementations of deterministic mode give a row the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm
from strata.kernels.op import OPERATIONS
from strata.kernels.rotary.rope import rope, rope_angles
from strata.kernels.sampling.sampling import gumbel_sample, token_logprobs

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 300


def assert_rows_stand_alone(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`run` takes the indices of rows; their results must be those they have among all rows."""
    together = run(torch.arange(ROWS))
    for count in (1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 100, 257):
        chosen = torch.randint(0, ROWS, (count,))
        assert torch.equal(run(chosen), together[chosen]), f"rows differ in a batch of {count}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(256, 768), (255, 4099), (768, 256), (1000, 96), (64, 1), (30, 6)])
def test_linear(width: int, out: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(ROWS, width).to(dtype), torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    run = linear.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(x[rows], weight, bias))


def test_linear_of_strided_rows() -> None:
    x, weight = torch.randn(ROWS, 333)[:, 7:263], torch.randn(64, 256)
    run = linear.bind("cpu", deterministic=True)
    assert torch.equal(run(x, weight, None), run(x.contiguous(), weight, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 255, 768, 1003])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate, up = torch.randn(ROWS, width).to(dtype), torch.randn(ROWS, width).to(dtype)
    run = silu_mul.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(gate[rows], up[rows]))
    both = torch.cat((gate, up), -1)
    assert torch.equal(run(*both.chunk(2, -1)), run(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 255, 1024, 16384])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(ROWS, width).to(dtype), torch.randn(width).to(dtype)
    run = rms_norm.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(x[rows], weight, 1e-5))
    strided = torch.cat((x, x), -1)[:, :width]
    assert torch.equal(run(strided, weight, 1e-5), run(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(dtype: torch.dtype) -> None:
    x, table = torch.randn(ROWS, 5, 24).to(dtype), torch.randn(ROWS, 24)
    angles, run = rope_angles.bind("cpu", deterministic=True), rope.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(x[rows], *angles(rows.int(), table)))


@pytest.mark.parametrize("vocab", [500, 4099])
def test_log_probabilities(vocab: int) -> None:
    logits, ids = torch.randn(ROWS, vocab), torch.randint(0, vocab, (ROWS, 3))
    run = token_logprobs.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(logits[rows], ids[rows]))


def test_sampled_ids() -> None:
    logits, seeds, steps = torch.randn(ROWS, 1001), torch.randint(-(2**63), 2**63 - 1, (ROWS,)), torch.arange(ROWS)
    temperatures = torch.arange(ROWS) % 3 / 2
    run = gumbel_sample.bind("cpu", deterministic=True)
    assert_rows_stand_alone(lambda rows: run(logits[rows], temperatures[rows], seeds[rows], steps[rows]))


@pytest.mark.parametrize(
    "name",
    [
        "embedding",
        "vocabulary_embedding",
        "rms_norm",
        "linear",
        "silu_mul",
        "rope_angles",
        "rope",
        "kv_write",
        "gumbel_sample",
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_operation_of_a_model_has_an_invariant_implementation(name: str, device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    assert OPERATIONS[name].bind(device, deterministic=True).candidates
