"""Log-probabilities from parts of the logits, in one process, beside those of one rank and counts by hand."""

from __future__ import annotations

import math

import pytest
import torch

from strata.hardware.roofline import Cost, Workload
from strata.kernels.sampling.part_logprobs import exponential_sums
from strata.kernels.sampling.sampling import logprobs
from tests.kernels.sampling.divided import told
from tests.kernels.sampling.test_parts import PARTS


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("vocabulary", [1, 5, 31, 4099])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_parts_tell_what_one_rank_tells(parts: int, vocabulary: int, top: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary, generator=generator) * 4
    ids = torch.randint(vocabulary, (6,), dtype=torch.int32, generator=generator)
    found, wanted = told(logits, ids, top, parts), logprobs(logits, ids, top)
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in wanted]
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=2e-6)
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[2], wanted[2])
    torch.testing.assert_close(found[3], wanted[3], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("parts", PARTS)
def test_of_equals_the_lower_ids_are_told_first(parts: int) -> None:
    logits = torch.tensor([[1.0, 2, 2, 0, 2, 1, 2, -math.inf, -math.inf]])
    _, ranks, top_ids, top = told(logits, torch.tensor([5]), 9, parts)
    assert top_ids.tolist() == [[1, 2, 4, 6, 0, 5, 3, 7, 8]]
    assert ranks.tolist() == [5]
    total = math.log(4 * math.exp(2) + 2 * math.exp(1) + 1)
    expected = [2 - total] * 4 + [1 - total] * 2 + [-total, -math.inf, -math.inf]
    assert top[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_that_are_ruled_out_and_rows_that_are_no_distribution(parts: int) -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    logits[0, : 40 // parts] = -math.inf
    logits[1] = -math.inf
    logits[2, 39] = math.nan
    logits[3, 0] = math.inf
    ids = torch.tensor([39, 0, 0, 7])
    (found, ranks, top_ids, top), wanted = told(logits, ids, 5, parts), logprobs(logits, ids, 5)
    torch.testing.assert_close(found[0], wanted[0][0])
    assert ranks[0] == wanted[1][0]
    assert torch.equal(top_ids[0], wanted[2][0])
    torch.testing.assert_close(top[0], wanted[3][0])
    # Nothing is told of rows that are no distribution, whichever part knows that they are none.
    assert found[1:].isnan().all()
    assert top[1:].isnan().all()


def test_sums_beyond_float32_are_told() -> None:
    logits = torch.tensor([[90.0, 1000.0, -5.0, 999.0], [-1e30, -1e30, -2e30, -3e30]])
    found, *_ = told(logits, torch.tensor([1, 0]), 1, 2)
    assert found.tolist() == pytest.approx([-math.log1p(math.exp(-1)), -math.log(2)], abs=1e-6)


def test_exponential_sums_are_those_of_python() -> None:
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    largest, total = exponential_sums(logits).unbind(1)
    for row, values in enumerate(logits.tolist()):
        assert largest[row] == max(values)
        assert total[row].item() == pytest.approx(math.fsum(math.exp(v - max(values)) for v in values), rel=1e-6)
    assert exponential_sums(torch.full((1, 3), -math.inf)).tolist() == [[-math.inf, 0.0]]
    assert exponential_sums(torch.empty(2, 0)).tolist() == [[-math.inf, 0.0]] * 2


def test_the_cost_is_that_of_a_hand_count() -> None:
    with torch.device("meta"):
        logits = torch.empty(3, 100)
        made, cost = exponential_sums.meta(logits), exponential_sums.cost(logits, workload=Workload((1,), (1,)))
    assert (made.shape, made.dtype) == ((3, 2), torch.float32)
    assert cost == Cost(flops=4 * 300, read=1200, written=24)
