"""Filters, masks and draws on CUDA, of all logits and by parts: against definitions, on any rows, in any company."""

from __future__ import annotations

import math

import pytest
import torch

from strata.kernels.sampling.filters import apply_bitmask, filter_bounds
from strata.kernels.sampling.sampling import NO_ID, gumbel_sample, logprobs, ruled_out, scaled
from strata.kernels.sampling.shards import best_in_shard, best_of_shards, exponential_sums
from tests.kernels.sampling.test_shards import cuts, drawn, told

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

ROWS = 48


def logits_of(kind: str, vocab: int) -> torch.Tensor:
    x = torch.randn(ROWS, vocab, device="cuda")
    if kind == "flat":
        return x * 0.01
    if kind == "peaked":
        return x * 6
    if kind == "ties":
        return (x * 2).round()
    if kind == "equal":
        return torch.zeros_like(x)
    if kind == "signed zeros":
        return torch.where(x > 0, 0.0, -0.0)
    x[:, ::3] = -math.inf
    x[:, 1::7] = -1e30
    return x * 3


def parameters(vocab: int) -> tuple[torch.Tensor, ...]:
    """Temperatures, top_k, top_p and min_p in all combinations of used and unused."""
    used = torch.arange(ROWS, device="cuda")[:, None] >> torch.arange(3, device="cuda") & 1 == 1
    temperatures = torch.rand(ROWS, device="cuda") * 2 + 0.05
    temperatures[-1] = 0
    small, large = torch.randint(1, 100, (ROWS,), device="cuda"), torch.randint(1, vocab + 9, (ROWS,), device="cuda")
    top_k = torch.where(torch.rand(ROWS, device="cuda") < 0.7, small, large)
    top_p = torch.rand(ROWS, device="cuda").clamp(min=1e-6)
    top_p[::11] = 1 - 2.0**-24
    min_p = torch.rand(ROWS, device="cuda") ** 4
    unused = torch.zeros((), device="cuda")
    return (
        temperatures,
        torch.where(used[:, 0], top_k, unused).int(),
        torch.where(used[:, 1], top_p, unused + 1),
        torch.where(used[:, 2], min_p, unused),
    )


def kept(logits: torch.Tensor, temperatures: torch.Tensor, bounds: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    scores = scaled(logits, temperatures)
    return ~ruled_out(scores, *bounds) & (scores > -math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 50, 4096, 151937, 262144])
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "equal", "signed zeros", "forbidden"])
def test_the_search_keeps_what_sorting_keeps(kind: str, vocab: int, dtype: torch.dtype) -> None:
    # Rows inside a wider tensor, at addresses that are no multiple of 16 bytes.
    wide = torch.empty(ROWS, vocab + 3, dtype=dtype, device="cuda")
    logits = wide[:, 1 : vocab + 1].copy_(logits_of(kind, vocab))
    temperatures, *filters = parameters(vocab)
    found = kept(logits, temperatures, filter_bounds(logits, temperatures, *filters))
    wanted = kept(logits, temperatures, filter_bounds.reference(logits, temperatures, *filters))
    sampled = temperatures > 0
    wrong = (found != wanted).any(1) & sampled
    assert not wrong.any(), [(i, *(f[i].item() for f in filters)) for i in wrong.nonzero()[:, 0].tolist()]


def test_bounds_do_not_depend_on_the_batch() -> None:
    logits = logits_of("peaked", 20011)
    inputs = parameters(20011)
    lowest, last = filter_bounds(logits, *inputs)
    for count in (1, 3, 17):
        rows = torch.randint(0, ROWS, (count,), device="cuda")
        again = filter_bounds(logits[rows], *(parameter[rows] for parameter in inputs))
        assert torch.equal(again[0], lowest[rows])
        assert torch.equal(again[1], last[rows])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_row_that_is_no_distribution_draws_nothing_and_harms_no_other(temperature: float, bounded: bool) -> None:
    sound = torch.randn(6, 30011, device="cuda")
    broken = sound.clone()
    broken[1, 29999] = math.nan
    broken[2] = -math.inf
    broken[3, 0] = math.inf
    broken[4] = math.nan
    temperatures, seeds = torch.full((6,), temperature, device="cuda"), torch.arange(6, device="cuda")
    filters = (torch.full((6,), 9, device="cuda").int(), torch.full((6,), 0.9, device="cuda"), seeds * 0.01)

    def ids(logits: torch.Tensor) -> list[int]:
        bounds = filter_bounds(logits, temperatures, *filters) if bounded else None
        drawn: list[int] = gumbel_sample(logits, temperatures, seeds, seeds, bounds).tolist()
        return drawn

    want = ids(sound)
    assert NO_ID not in want
    assert ids(broken) == [want[0], *[NO_ID] * 4, want[5]]


def test_filtered_draws_are_those_of_the_cpu() -> None:
    logits = logits_of("peaked", 5003)
    inputs = parameters(5003)
    seeds, steps = torch.arange(ROWS, device="cuda"), torch.arange(ROWS, device="cuda").int()
    ids = gumbel_sample(logits, inputs[0], seeds, steps, filter_bounds(logits, *inputs))
    host = [x.cpu() for x in (logits, *inputs)]
    want = gumbel_sample(host[0], host[1], seeds.cpu(), steps.cpu(), filter_bounds(*host))
    # The noise may differ in the last bit between processors.
    assert (ids.cpu() == want).float().mean() > 0.97


def draw_inputs() -> tuple[torch.Tensor, ...]:
    temperatures = torch.rand(ROWS, device="cuda") * 2 * (torch.arange(ROWS, device="cuda") % 3 > 0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (ROWS,), device="cuda")
    return temperatures, seeds, torch.randint(0, 10000, (ROWS,), device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab", [1, 5, 50, 4099, 151937])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_draw_the_ids_of_one_rank(parts: int, vocab: int, dtype: torch.dtype) -> None:
    # Rounded, so that equal logits stand in several parts.
    logits = (torch.randn(ROWS, vocab + 3, device="cuda") * 3).round().to(dtype)[:, 1 : vocab + 1]
    given = draw_inputs()
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
    found = best_in_shard(logits, greedy, seeds, seeds, 33)
    assert torch.equal(found, best_in_shard.reference(logits, greedy, seeds, seeds, 33))
    keys = torch.cat((found, found.flip(0), found - 1), 1)
    assert torch.equal(best_of_shards(keys), best_of_shards.reference(keys))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 50), (5, 4097), (33, 151936), (256, 32000)])
def test_it_is_its_reference(rows: int, vocab: int, dtype: torch.dtype) -> None:
    # Rows inside a wider tensor, masks at an odd address, and more words than the ids need.
    wide = torch.randn(rows, vocab + 3, device="cuda").to(dtype)
    logits = wide[:, 1 : vocab + 1]
    words = -(-vocab // 32) + 1
    buffer = torch.randint(-(2**31), 2**31, (1 + rows * words,), dtype=torch.int32, device="cuda")
    masks = buffer[1:].view(rows, words)
    which = torch.randint(-1, rows, (rows,), dtype=torch.int32, device="cuda")
    outside, last = wide[:, [0, -2, -1]], logits[-1:].clone()
    expected = apply_bitmask.reference(logits.clone(), masks, which)
    assert torch.equal(apply_bitmask(logits, masks, which), expected)
    assert torch.equal(wide[:, [0, -2, -1]], outside)
    assert torch.equal(apply_bitmask(last, masks, which[-1:]), expected[-1:])
