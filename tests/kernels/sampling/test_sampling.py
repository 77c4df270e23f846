"""Sampling and masks of ids against slow twins in plain Python, and its statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strata.hardware.roofline import Workload
from strata.kernels.sampling.filters import apply_bitmask, filter_bounds
from strata.kernels.sampling.filters_triton import integer_probabilities
from strata.kernels.sampling.sampling import (
    NO_ID,
    gumbel_noise,
    gumbel_sample,
    likeliest,
    logprobs,
    penalize,
    ruled_out,
    scaled,
)

# Few different values, so that ties are frequent.
LOGIT = st.one_of(st.integers(-4, 4).map(float), st.floats(-20, 20, width=32))
ROW = st.tuples(
    st.lists(LOGIT, min_size=6, max_size=6),
    st.integers(0, 9),
    st.one_of(st.just(1.0), st.floats(0.015625, 1, width=32)),
    st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
)


def slow_filter(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """One row, an id at a time. Discards examples that a rounding error would decide."""
    kept = set(range(len(logits)))
    best = max(logits)
    for i, logit in enumerate(logits):
        ratio = math.exp(logit - best)
        assume(logit == best or min_p == 0 or abs(ratio - min_p) > 1e-6 * min_p)
        if ratio < min_p:
            kept.discard(i)
    if top_k > 0:
        kth = sorted((logits[i] for i in kept), reverse=True)[:top_k][-1]
        kept = {i for i in kept if logits[i] >= kth}
    if top_p < 1:
        total = sum(math.exp(logits[i] - best) for i in kept)
        mass, inside = 0.0, set()
        for i in sorted(kept, key=lambda i: (-logits[i], i)):
            assume(mass == 0 or abs(mass - top_p * total) > 1e-6)
            if mass < top_p * total:
                inside.add(i)
            mass += math.exp(logits[i] - best)
        kept = inside
    return [logit if i in kept else -math.inf for i, logit in enumerate(logits)]


def filtered(logits: torch.Tensor, temperatures: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """Scaled logits, -inf where the filters removed the id."""
    scores = scaled(logits, temperatures)
    return scores.masked_fill(ruled_out(scores, *filter_bounds(logits, temperatures, *parameters)), -torch.inf)


@settings(max_examples=300, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=4))
def test_filters_are_those_of_the_slow_twin(rows: list[tuple[list[float], int, float, float]]) -> None:
    expected = [slow_filter(*row) for row in rows]
    logits, top_k, top_p, min_p = zip(*rows, strict=True)
    parameters = (torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p))
    assert filtered(torch.tensor(logits), torch.ones(len(rows)), *parameters).tolist() == expected


def test_the_id_that_crosses_top_p_stays_and_equals_go_by_id() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(8), math.log(4), math.log(2), math.log(2)]])
    top_p = torch.tensor([0.6, 0.51])
    found = filtered(logits, torch.ones(2), torch.zeros(2, dtype=torch.int32), top_p, torch.zeros(2))
    assert (found > -math.inf).tolist() == [[True, True, True, False], [True, True, False, False]]


def test_rows_without_filters_keep_their_bits() -> None:
    logits = torch.randn(3, 1000) * 50
    logits[:, 7] = -math.inf
    top_k, top_p = torch.tensor([0, 5, 0]).int(), torch.tensor([1.0, 1, 0.5])
    found = filtered(logits, torch.ones(3), top_k, top_p, torch.zeros(3))
    assert torch.equal(found[0], logits[0])
    assert (found[1] > -math.inf).sum() == 5
    assert found[2].argmax() == logits[2].argmax()


def test_filters_see_logits_divided_by_the_temperature() -> None:
    logits = torch.tensor([[0.0, math.log(3)]]).expand(3, -1)
    parameters = (torch.zeros(3, dtype=torch.int32), torch.full((3,), 0.8), torch.zeros(3))
    found = filtered(logits, torch.tensor([1.0, 0.5, 0.0]), *parameters)
    # Three to one is 75 %; at half the temperature nine to one, 90 %. A greedy row is not filtered.
    assert (found > -math.inf).tolist() == [[True, True], [False, True], [True, True]]


def test_integer_probabilities_are_exponentials_and_sum_without_rounding() -> None:
    below = -torch.rand(10000) * 30
    below[0] = 0
    found = integer_probabilities(below)
    assert found[0] == 2**40
    torch.testing.assert_close(found.double() / 2**40, below.double().exp(), rtol=4e-6, atol=2.0**-40)
    assert integer_probabilities(torch.tensor([-28.0, -1e30, -math.inf])).tolist() == [0, 0, 0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(LOGIT, min_size=5, max_size=5),
    st.lists(st.integers(0, 3), min_size=5, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    st.sampled_from([-1.5, 0.0, 0.7]),
    st.sampled_from([-0.5, 0.0, 1.2]),
)
def test_penalties_are_those_of_the_slow_twin(
    logits: list[float],
    counts: list[int],
    in_prompt: list[bool],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    expected = []
    for logit, count, seen in zip(logits, counts, in_prompt, strict=True):
        if count or seen:
            logit = logit / repetition if logit > 0 else logit * repetition
        expected.append(logit - frequency * count - (presence if count else 0))
    # A second row without penalties must come through untouched.
    found = penalize(
        torch.tensor([logits, logits]),
        torch.tensor([counts, counts]),
        torch.tensor([in_prompt, in_prompt]),
        torch.tensor([repetition, 1]),
        torch.tensor([presence, 0]),
        torch.tensor([frequency, 0]),
    )
    torch.testing.assert_close(found[0], torch.tensor(expected), rtol=1e-6, atol=1e-5)
    assert found[1].tolist() == torch.tensor(logits).tolist()


def slow_noise(seed: int, step: int, token: int) -> float:
    """The noise in Python integers: SplitMix64 for the key, MurmurHash3's finalizer for the id."""

    def mix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    key = mix64((mix64(seed % 2**64) + step) % 2**64)
    bits = token * 0x9E3779B9 % 2**32 ^ key % 2**32
    bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
    bits = (bits + (key >> 32)) % 2**32
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
    bits ^= bits >> 16
    return -math.log(-math.log1p(-((bits >> 1) + 0.5) * 2.0**-31))


def test_noise_is_the_hash_of_seed_step_and_id() -> None:
    seeds, steps = [0, 1, -1, 2**62 + 12345, -(2**63)], [0, 7, 1, 100000, 3]
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor(steps, dtype=torch.int32), 300)
    slow = [[slow_noise(seed, step, token) for token in range(300)] for seed, step in zip(seeds, steps, strict=True)]
    torch.testing.assert_close(noise, torch.tensor(slow), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vary", ["seeds", "steps"])
def test_frequencies_are_the_probabilities(vary: str) -> None:
    draws = 40000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, -2.0, -math.inf, 0.3])
    counter, zero = torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    seeds, steps = (counter, zero) if vary == "seeds" else (zero, counter)
    ids = gumbel_sample(logits.expand(draws, -1), torch.ones(draws), seeds, steps)
    expected = logits.double().softmax(-1) * draws
    counts = ids.long().bincount(minlength=9)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected) ** 2 / expected)[possible].sum()
    assert chi_square < 29.9  # 7 degrees of freedom: once in ten thousand


def test_consecutive_draws_are_independent() -> None:
    draws = 40000
    seeds = torch.full((draws,), 99)
    ids = gumbel_sample(torch.zeros(draws, 4), torch.ones(draws), seeds, torch.arange(draws)).long()
    pairs = (ids[:-1] * 4 + ids[1:]).bincount(minlength=16).double()
    expected = (draws - 1) / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 44.3  # 15 degrees of freedom: once in ten thousand


def test_noise_has_the_moments_of_a_gumbel_variable_and_no_infinity() -> None:
    noise = gumbel_noise(torch.arange(200), torch.zeros(200, dtype=torch.int64), 20000).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=4e-3)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=4e-3)
    # The expected largest of n is log n + 0.577.
    assert noise.amax(-1).mean().item() == pytest.approx(math.log(20000) + 0.577, abs=0.3)


def test_greedy_rows_take_the_largest_logit_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3, 3, 1], [5, 1, 5, 5], [0, 0, 1, 0]])
    for temperatures in ([0.0, 0.0, 0.0], [0.0, 0.0, 1.0]):
        ids = gumbel_sample(logits, torch.tensor(temperatures), torch.arange(3), torch.arange(3))
        assert ids[:2].tolist() == [1, 0]
        assert ids.dtype == torch.int32


def test_a_single_allowed_id_is_always_drawn() -> None:
    logits = torch.full((500, 50), -math.inf)
    logits[:, 33] = 0
    ids = gumbel_sample(logits, torch.ones(500), torch.arange(500), torch.arange(500))
    assert ids.unique().tolist() == [33]


def test_only_ids_within_the_bounds_are_drawn() -> None:
    logits = torch.tensor([0.0, 1, 2, 1, 1]).expand(500, -1)
    bounds = torch.full((500,), 0.2), torch.full((500,), 3, dtype=torch.int32)
    ids = gumbel_sample(logits, torch.full((500,), 5.0), torch.arange(500), torch.arange(500), bounds)
    assert ids.unique().tolist() == [1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_row_that_is_no_distribution_draws_nothing_and_harms_no_other(
    temperature: float, dtype: torch.dtype, bounded: bool
) -> None:
    sound = torch.randn(6, 100).to(dtype)
    broken = sound.clone()
    broken[1, 50] = math.nan
    broken[2] = -math.inf
    broken[3, 0] = math.inf
    broken[4] = math.nan
    temperatures, seeds, steps = torch.full((6,), temperature), torch.arange(6), torch.arange(6)
    bounds = some = None
    rest = torch.tensor([0, 5])
    if bounded:
        filters = (torch.full((6,), 9, dtype=torch.int32), torch.full((6,), 0.9), torch.zeros(6))
        bounds = filter_bounds(broken, temperatures, *filters)
        some = tuple(bound[rest] for bound in bounds)
    ids = gumbel_sample(broken, temperatures, seeds, steps, bounds)
    assert ids[1:5].tolist() == [NO_ID] * 4
    assert torch.equal(ids[rest], gumbel_sample(sound[rest], temperatures[rest], seeds[rest], steps[rest], some))
    assert likeliest(broken)[1:5].tolist() == [NO_ID] * 4
    assert torch.equal(likeliest(broken)[rest], sound[rest].argmax(-1).int())


@pytest.mark.parametrize("top", [0, 1, 5, 40])
def test_logprobs(top: int) -> None:
    logits = torch.randn(6, 31)
    ids = torch.randint(0, 31, (6,), dtype=torch.int32)
    chosen, ranks, top_ids, values = logprobs(logits, ids, top)
    for row in range(6):
        total = math.log(sum(math.exp(x) for x in logits[row].tolist()))
        order = sorted(range(31), key=lambda i: -logits[row, i].item())
        assert chosen[row].item() == pytest.approx(logits[row, ids[row]].item() - total, abs=1e-5)
        assert order[ranks[row] - 1] == ids[row]
        assert top_ids[row].tolist() == order[:top]
        assert values[row].tolist() == pytest.approx([logits[row, i].item() - total for i in order[:top]], abs=1e-5)


BF16 = torch.bfloat16


def packed(allowed: set[int], words: int) -> list[int]:
    """The words of a mask as int32 numbers, from the ids that it allows."""
    unsigned = [sum(1 << bit for bit in range(32) if 32 * word + bit in allowed) for word in range(words)]
    return [word - 2**32 if word >= 2**31 else word for word in unsigned]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 4097])
def test_only_allowed_ids_keep_their_logits(vocab: int) -> None:
    words = -(-vocab // 32)
    generator = torch.Generator().manual_seed(vocab)
    sets = [set(torch.randint(vocab, (vocab,), generator=generator).tolist()), {vocab - 1}, set()]
    masks = torch.tensor([packed(allowed, words) for allowed in sets], dtype=torch.int32)
    which = [2, -1, 0, 1, 0]
    logits = torch.randn(5, vocab, generator=generator)
    before = logits.tolist()
    assert apply_bitmask(logits, masks, torch.tensor(which, dtype=torch.int32)) is logits
    for row, mask in enumerate(which):
        allowed = set(range(vocab)) if mask < 0 else sets[mask]
        kept = before[row]
        assert logits[row].tolist() == [kept[id] if id in allowed else -math.inf for id in range(vocab)]


def test_nan_stays_where_it_is_allowed() -> None:
    """A row that is no distribution must still be seen to be none."""
    logits = torch.tensor([[math.nan, math.nan, 1.0]])
    found = apply_bitmask(logits, torch.tensor([[0b110]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert found[0, 0] == -math.inf
    assert found[0, 1].isnan()
    assert found[0, 2] == 1


def test_it_reads_masks_and_writes_at_most_all_logits() -> None:
    with torch.device("meta"):
        arguments = (
            torch.empty(3, 64, dtype=BF16),
            torch.empty(2, 2, dtype=torch.int32),
            torch.empty(3, dtype=torch.int32),
        )
        made = apply_bitmask.meta(*arguments)
        cost = apply_bitmask.cost(*arguments, workload=Workload((1, 1, 1), (1, 1, 1)))
    assert (made.shape, made.dtype) == ((3, 64), BF16)
    assert (cost.read, cost.written) == (2 * 2 * 4 + 3 * 4, 3 * 64 * 2)
