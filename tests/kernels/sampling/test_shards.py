"""Draws and log-probabilities from parts of the logits, in one process: those of one rank from all of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.sampling.filters import apply_bitmask
from strata.kernels.sampling.sampling import NO_ID, gumbel_noise, gumbel_sample, logprobs
from strata.kernels.sampling.shards import (
    NO_KEY,
    best_in_shard,
    best_of_shards,
    count_above,
    exponential_sums,
    key_ids,
    key_scores,
    logprobs_in_shard,
    logprobs_of_shards,
    score_keys,
)


def cuts(vocabulary: int, parts: int) -> list[tuple[int, int]]:
    """First and end of each rank's ids: as many for all but the last ones, which hold fewer or none."""
    own = -(-vocabulary // parts)
    bounds = [min(part * own, vocabulary) for part in range(parts + 1)]
    return list(pairwise(bounds))


def drawn(logits: Tensor, parts: int, *inputs: Tensor) -> Tensor:
    """The ids of `gumbel_sample`, as ranks draw them; each part lies inside the wider tensor."""
    own = [best_in_shard(logits[:, first:end], *inputs, first) for first, end in cuts(logits.shape[1], parts)]
    return best_of_shards(torch.cat(own, 1))  # type: ignore[no-any-return]


def told(logits: Tensor, ids: Tensor, top: int, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `logprobs` gives, as ranks make it."""
    vocabulary = logits.shape[1]
    own = [(logits[:, first:end], first) for first, end in cuts(vocabulary, parts)]
    found = torch.stack([logprobs_in_shard(part, ids, top, first) for part, first in own], 1)
    assert found.shape == (len(logits), parts, 2 + top)
    chosen, chosen_logprobs, top_ids, top_logprobs = logprobs_of_shards(found, vocabulary)
    wanted = logits.float().gather(1, ids.long()[:, None])[:, 0]
    assert torch.equal(chosen, wanted.nan_to_num(torch.inf, torch.inf, -torch.inf))
    ranks = torch.cat([count_above(part, chosen) for part, _ in own], 1).sum(1, dtype=torch.int32) + 1
    return chosen_logprobs, ranks, top_ids, top_logprobs


PARTS = [1, 2, 3, 4, 8]
SOME = Workload((1,), (1,))


def inputs(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, every third of them 0, seeds and steps."""
    temperatures = torch.rand(rows, generator=generator) * 2 * (torch.arange(rows) % 3 > 0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return temperatures, seeds, torch.randint(0, 10000, (rows,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("vocabulary", [1, 5, 31, 512, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_draw_the_ids_of_one_rank(parts: int, vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary + parts)
    rows = 60
    logits = (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)
    given_to_all = inputs(rows, generator)
    assert torch.equal(drawn(logits, parts, *given_to_all), gumbel_sample(logits, *given_to_all))
    greedy = (torch.zeros(rows), *given_to_all[1:])
    assert torch.equal(drawn(logits, parts, *greedy), gumbel_sample(logits, *greedy))


@pytest.mark.parametrize("parts", PARTS)
def test_the_noise_of_a_part_is_that_of_its_ids(parts: int) -> None:
    """Bit for bit: draws that differ by one in ten million could else differ unseen."""
    seeds, steps = torch.arange(7), torch.arange(7)
    whole = gumbel_noise(seeds, steps, 4099)
    own = [gumbel_noise(seeds, steps, end - first, first) for first, end in cuts(4099, parts)]
    assert torch.equal(torch.cat(own, 1), whole)


# Few different values, so that ties are frequent, also across parts.
VALUE = st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.5, 1.5, 3.0, 3.0, math.inf, math.nan])


@settings(max_examples=300, deadline=None)
@given(st.lists(VALUE, min_size=1, max_size=11), st.sampled_from(PARTS), st.sampled_from([0.0, 0.7]))
def test_ties_infinities_and_nan_in_any_part(row: list[float], parts: int, temperature: float) -> None:
    logits = torch.tensor([row, [0.0] * len(row)])
    rest = torch.tensor([temperature, 0.0]), torch.tensor([3, 4]), torch.tensor([5, 6])
    ids = drawn(logits, parts, *rest)
    assert torch.equal(ids, gumbel_sample(logits, *rest))
    assert ids[1] == 0  # of equals the lowest
    if any(value != value or value == math.inf for value in row) or set(row) == {-math.inf}:
        assert ids[0] == NO_ID


@pytest.mark.parametrize("parts", [2, 4])
def test_frequencies_are_the_probabilities(parts: int) -> None:
    draws = 40000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, -2.0, -math.inf, 0.3])
    ids = drawn(logits.expand(draws, -1), parts, torch.ones(draws), torch.arange(draws), torch.zeros(draws).long())
    expected = logits.double().softmax(-1) * draws
    counts = ids.long().bincount(minlength=9)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - expected) ** 2 / expected)[possible].sum() < 29.9  # 7 degrees of freedom: once in ten thousand


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.integers(0, 2**31 - 1)), min_size=2, max_size=2))
def test_keys_have_the_order_of_scores_and_then_of_lower_ids(pairs: list[tuple[float, int]]) -> None:
    scores, ids = (torch.tensor(column) for column in zip(*pairs, strict=True))
    keys = score_keys(scores, ids)
    assert torch.equal(key_scores(keys), scores)  # which holds of -0 and 0 as well
    assert torch.equal(key_ids(keys).long(), ids)
    expected = (pairs[0][0], -pairs[0][1]) > (pairs[1][0], -pairs[1][1])
    assert (keys[0] > keys[1]).item() == expected
    assert (keys > NO_KEY).all()


def test_nan_has_the_key_of_infinity_and_no_key_is_no_id() -> None:
    ids = torch.tensor([3, 3])
    assert score_keys(torch.tensor([math.nan, math.inf]), ids).unique().numel() == 1
    assert best_of_shards(torch.full((2, 3), NO_KEY)).tolist() == [NO_ID, NO_ID]


def test_costs_are_those_of_a_hand_count() -> None:
    with torch.device("meta"):
        logits = torch.empty(3, 100, dtype=torch.bfloat16)
        rest = torch.empty(3), torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
        made = best_in_shard.meta(logits, *rest, 50)
        cost = best_in_shard.cost(logits, *rest, 50, workload=SOME)
        keys = torch.empty(3, 8, dtype=torch.int64)
        ids = best_of_shards.meta(keys)
        choice = best_of_shards.cost(keys, workload=SOME)
    assert (made.shape, made.dtype) == ((3, 1), torch.int64)
    # 16 operations an id; 2 bytes a logit and 4 + 8 + 4 a row come in, 8 a row go out.
    assert cost == Cost(flops=16 * 300, read=600 + 3 * 16, written=24)
    assert (ids.shape, ids.dtype) == ((3,), torch.int32)
    assert choice == Cost(flops=24, read=192, written=12)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("vocabulary", [1, 33, 100, 4097])
def test_a_part_of_a_mask_rules_out_what_the_mask_does(parts: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    masks = torch.randint(-(2**31), 2**31, (2, -(-vocabulary // 32)), dtype=torch.int32, generator=generator)
    which = torch.tensor([1, -1, 0, 1], dtype=torch.int32)
    logits = torch.randn(4, vocabulary, generator=generator)
    own = [apply_bitmask(logits[:, first:end].clone(), masks, which, first) for first, end in cuts(vocabulary, parts)]
    assert torch.equal(torch.cat(own, 1), apply_bitmask(logits.clone(), masks, which))


def test_a_part_of_a_mask_reads_its_own_words() -> None:
    with torch.device("meta"):
        logits, which = torch.empty(3, 40), torch.empty(3, dtype=torch.int32)
        cost = apply_bitmask.cost(logits, torch.empty(2, 9, dtype=torch.int32), which, 60, workload=SOME)
    # Ids 60 to 99 are in words 1, 2 and 3 of both masks.
    assert (cost.read, cost.written) == (2 * 3 * 4 + 3 * 4, 3 * 40 * 4)


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


def test_the_cost_of_exponential_sums() -> None:
    with torch.device("meta"):
        logits = torch.empty(3, 100)
        made, cost = exponential_sums.meta(logits), exponential_sums.cost(logits, workload=Workload((1,), (1,)))
    assert (made.shape, made.dtype) == ((3, 2), torch.float32)
    assert cost == Cost(flops=4 * 300, read=1200, written=24)
