"""The gated delta rule: equal to transformers' recurrence and to one in float64, in pieces, in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from strata.hardware.roofline import Cost, Workload
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.state.fixed import FixedStates

from .steps import HERE, in_pieces, pool, step

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 6, 7, 5
SHAPE = (HEADS, KEY_DIM, VALUE_DIM)
RUNS = {
    "reference": gated_delta.reference,
    "chunks": gated_delta.bind("cpu"),
    "recurrence": gated_delta.bind("cpu", deterministic=True),
}
EXACT = RUNS["recurrence"]


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """What has a row a token, and the weights of heads; keys of a sequence are alike, so that they overwrite much."""
    rows = [torch.randn(tokens, KEY_HEADS, KEY_DIM), torch.randn(tokens, KEY_HEADS, KEY_DIM) + 1]
    rows += [torch.randn(tokens, HEADS, VALUE_DIM), torch.randn(tokens, HEADS), torch.randn(tokens, HEADS) + 1]
    weights = [torch.randn(HEADS) - 3, torch.randn(HEADS)]
    return [one.to(dtype) for one in rows], [one.to(dtype) for one in weights]


def oracle(rows: list[Tensor], weights: list[Tensor], lengths: list[int]) -> Tensor:
    """One matrix after another, in float64."""
    q, k, v, a, b = (one.double() for one in rows)
    bias, a_log = (one.double() for one in weights)
    decays = torch.exp(-torch.exp(a_log) * torch.log1p(torch.exp(a + bias)))
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    q, k = (one[:, torch.arange(HEADS) // (HEADS // KEY_HEADS)] for one in (q, k))
    result, token = torch.empty_like(v), 0
    for length in lengths:
        state = torch.zeros(SHAPE, dtype=torch.float64)
        for _ in range(length):
            left = decays[token, :, None, None] * state
            change = (v[token] - torch.einsum("hkv,hk->hv", left, k[token])) / (1 + torch.exp(-b[token, :, None]))
            state = left + torch.einsum("hk,hv->hkv", k[token], change)
            result[token] = torch.einsum("hkv,hk->hv", state, q[token]) / KEY_DIM**0.5
            token += 1
    return result


@pytest.fixture(scope="module")
def long() -> tuple[list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(1)
    rows, weights = inputs(2071)
    return rows, weights, oracle(rows, weights, [2000, 1, 70])


@pytest.mark.parametrize("name", ["chunks", "recurrence"])
def test_two_thousand_tokens_stay_with_the_recurrence_in_float64(name: str, long: Any) -> None:
    rows, weights, wanted = long
    assert wanted.abs().max() > 0.3
    assert (RUNS[name](*rows, *weights, step([2000, 1, 70]), 0) - wanted).abs().max() < 1e-4


def test_it_is_the_rule_of_transformers() -> None:
    rows, weights = inputs(30)
    decays = -weights[1].exp() * torch.nn.functional.softplus(rows[3] + weights[0])
    given = [one[None] for one in (*rows[:3], decays, rows[4].sigmoid())]
    wanted, _ = torch_recurrent_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)
    for run in RUNS.values():
        assert (run(*rows, *weights, step([30]), 0) - wanted[0]).abs().max() < 1e-5


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_pieces_of_sequences_equal_the_whole(run: Any) -> None:
    lengths, cuts = [70, 1, 9], [(65, 0, 3), (0, 1, 0), (1, 0, 5), (4, 0, 1)]
    rows, weights = inputs(80)
    states = pool(5, ((1,), torch.float32), (SHAPE, torch.float32))
    found, slots = in_pieces(run, rows, [*weights, HERE, 0], lengths, states, cuts)
    assert (found - oracle(rows, weights, lengths)).abs().max() < 1e-5
    held = states.tensors[0][1]
    assert held[slots.long()].isfinite().all()
    assert held[[row for row in range(5) if row not in slots.tolist()]].isnan().all()


def test_the_exact_form_has_the_same_bits_however_a_prompt_is_divided() -> None:
    rows, weights = inputs(30)
    whole = EXACT(*rows, *weights, step([21, 9]), 0)
    states = pool(3, ((1,), torch.float32), (SHAPE, torch.float32))
    cuts = [(20, 0), (0, 2), (1, 4), (0, 3)]
    found, _ = in_pieces(EXACT, rows, [*weights, HERE, 0], [21, 9], states, cuts)
    assert torch.equal(found, whole)
    assert torch.equal(EXACT(*(one[21:] for one in rows), *weights, step([9]), 0), whole[21:])


def test_sixteen_bits_are_rounded_once() -> None:
    rows, weights = inputs(90, torch.bfloat16)
    wanted = oracle(rows, weights, [90])
    for run in RUNS.values():
        found = run(*rows, *weights, step([90]), 0)
        assert found.dtype == torch.bfloat16
        assert ((found - wanted).abs() <= wanted.abs() / 200 + 1e-3).all()


def test_gradients_are_those_of_the_recurrence() -> None:
    rows, weights = inputs(80, torch.float64)
    given = [one.requires_grad_() for one in (*rows, *weights)]
    pull = torch.randn(80, HEADS, VALUE_DIM, dtype=torch.float64)
    runs = (gated_delta, gated_delta.reference)
    found = [torch.autograd.grad((run(*given, step([70, 10]), 0) * pull).sum(), given) for run in runs]
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9 * max(1, other.abs().max().item()))


def test_costs_are_the_hand_counts() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = [meta(7, KEY_HEADS, KEY_DIM), meta(7, KEY_HEADS, KEY_DIM), meta(7, *SHAPE[::2]), meta(7, 6), meta(7, 6)]
    # decay, read (2), put (2), read (2) of 35 numbers; correct 5 values (2); gates; 7 for each of 7 dimensions
    flops = 7 * (6 * (7 * 35 + 2 * 5 + 10) + 2 * 7 * 7)
    read = 2 * (2 * 7 * 14 + 7 * 30 + 2 * 7 * 6 + 2 * 6)
    found = gated_delta.cost(*rows, meta(6), meta(6), step([7]), 0, workload=Workload((7,), (7,)))
    assert found == Cost(flops, read, 420, 24)
    states = FixedStates(((meta(3, 1), meta(3, *SHAPE, dtype=torch.float32)),), meta(3))
    workload = Workload((6, 1), (6, 4))
    kept = gated_delta.cost(*rows, meta(6), meta(6), step([6, 1], None, states), 0, workload=workload)
    assert kept == Cost(flops, read + 840, 420 + 2 * 840, 24, 3 * 840)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_sequence_with_nan_fails_alone(run: Any) -> None:
    rows, weights = inputs(20)
    wanted = run(*(one[12:] for one in rows), *weights, step([8]), 0)
    for one in rows:
        one[:12] = torch.nan
    found = run(*rows, *weights, step([12, 8]), 0)
    assert found[:12].isnan().all()
    assert torch.allclose(found[12:], wanted, atol=1e-5)
