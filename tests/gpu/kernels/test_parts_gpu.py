"""Draws and log-probabilities from parts of the logits on CUDA: bit for bit what one rank draws from all of them."""

from __future__ import annotations

import math

import pytest
import torch

from strata.kernels.sampling.bitmask import apply_bitmask
from strata.kernels.sampling.part_logprobs import exponential_sums
from strata.kernels.sampling.parts import best_in_part, best_of_parts
from strata.kernels.sampling.sampling import NO_ID, gumbel_sample, logprobs
from tests.kernels.sampling.test_parts import cuts, drawn, told

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

ROWS = 48


def inputs() -> tuple[torch.Tensor, ...]:
    temperatures = torch.rand(ROWS, device="cuda") * 2 * (torch.arange(ROWS, device="cuda") % 3 > 0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (ROWS,), device="cuda")
    return temperatures, seeds, torch.randint(0, 10000, (ROWS,), device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab", [1, 5, 50, 4099, 151937])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_draw_the_ids_of_one_rank(parts: int, vocab: int, dtype: torch.dtype) -> None:
    # Rounded, so that equal logits stand in several parts.
    logits = (torch.randn(ROWS, vocab + 3, device="cuda") * 3).round().to(dtype)[:, 1 : vocab + 1]
    given = inputs()
    assert torch.equal(drawn(logits, parts, *given), gumbel_sample(logits, *given))
    random = torch.randn(ROWS, vocab, device="cuda").to(dtype)
    assert torch.equal(drawn(random, parts, *given), gumbel_sample(random, *given))


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_no_distribution_draw_nothing(parts: int, temperature: float) -> None:
    logits = torch.randn(6, 30011, device="cuda")
    want = logits.clone()
    logits[1, 29999] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    logits[4] = math.nan
    seeds = torch.arange(6, device="cuda")
    rest = torch.full((6,), temperature, device="cuda"), seeds, seeds.int()
    ids = drawn(logits, parts, *rest)
    assert ids[1:5].tolist() == [NO_ID] * 4
    assert torch.equal(ids[[0, 5]], gumbel_sample(want, *rest)[[0, 5]])


@pytest.mark.parametrize("vocab", [50, 4099, 151936])
def test_the_kernels_are_their_references(vocab: int) -> None:
    logits = torch.randn(ROWS, vocab, device="cuda") * 4
    logits[3] = -math.inf
    greedy, seeds = torch.zeros(ROWS, device="cuda"), torch.arange(ROWS, device="cuda")
    found = best_in_part(logits, greedy, seeds, seeds, 33)
    assert torch.equal(found, best_in_part.reference(logits, greedy, seeds, seeds, 33))
    keys = torch.cat((found, found.flip(0), found - 1), 1)
    assert torch.equal(best_of_parts(keys), best_of_parts.reference(keys))
    torch.testing.assert_close(exponential_sums(logits), exponential_sums.reference(logits), rtol=2e-6, atol=0)
    half = exponential_sums(logits.bfloat16())
    torch.testing.assert_close(half, exponential_sums.reference(logits.bfloat16()), rtol=2e-6, atol=0)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("vocab", [50, 4099, 151936])
def test_parts_tell_the_logprobs_of_one_rank(parts: int, vocab: int) -> None:
    logits = torch.randn(30, vocab, device="cuda") * 4
    logits[:, 3] = -torch.inf
    ids = torch.randint(0, vocab, (30,), device="cuda", dtype=torch.int32)
    found, wanted = told(logits, ids, 5, parts), logprobs(logits, ids, 5)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-6, atol=4e-6)
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[3], wanted[3], rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("vocab", [50, 4097, 151936])
def test_a_part_of_a_mask_rules_out_what_the_mask_does(parts: int, vocab: int) -> None:
    masks = torch.randint(-(2**31), 2**31, (ROWS, -(-vocab // 32)), dtype=torch.int32, device="cuda")
    which = torch.randint(-1, ROWS, (ROWS,), dtype=torch.int32, device="cuda")
    logits = torch.randn(ROWS, vocab, device="cuda").bfloat16()
    own = [apply_bitmask(logits[:, first:end].clone(), masks, which, first) for first, end in cuts(vocab, parts)]
    assert torch.equal(torch.cat(own, 1), apply_bitmask.reference(logits.clone(), masks, which))
