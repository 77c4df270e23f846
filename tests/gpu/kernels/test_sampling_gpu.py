"""Filters and draws on CUDA: against the definition by sorting, in any company, on rows that are no distribution."""

from __future__ import annotations

import math

import pytest
import torch

from strata.kernels.sampling.filters import filter_bounds
from strata.kernels.sampling.sampling import NO_ID, gumbel_sample, ruled_out, scaled

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
