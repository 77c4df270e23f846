"""Draws from parts of the logits, in one process: the ids are those that one rank draws from all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.sampling.bitmask import apply_bitmask
from strata.kernels.sampling.parts import best_in_part, best_of_parts
from strata.kernels.sampling.sampling import NO_ID, gumbel_noise, gumbel_sample
from strata.kernels.sampling.score_keys import NO_KEY, key_ids, key_scores, score_keys
from tests.kernels.sampling.divided import cuts, drawn

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
    assert best_of_parts(torch.full((2, 3), NO_KEY)).tolist() == [NO_ID, NO_ID]


def test_costs_are_those_of_a_hand_count() -> None:
    with torch.device("meta"):
        logits = torch.empty(3, 100, dtype=torch.bfloat16)
        rest = torch.empty(3), torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
        made = best_in_part.meta(logits, *rest, 50)
        cost = best_in_part.cost(logits, *rest, 50, workload=SOME)
        keys = torch.empty(3, 8, dtype=torch.int64)
        ids = best_of_parts.meta(keys)
        choice = best_of_parts.cost(keys, workload=SOME)
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
