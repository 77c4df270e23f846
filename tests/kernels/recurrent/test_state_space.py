"""Mamba-2's state space and its gated norm: equal to the recurrence in float64, in pieces, in any company."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import Operation
from strata.kernels.recurrent.calls import StateSpaceSpec
from strata.kernels.recurrent.gated_norm import gated_rms_norm
from strata.kernels.recurrent.state_space import state_space
from strata.kernels.state.fixed import FixedStates

from ..test_invariance import ROWS, assert_rows_stand_alone
from .steps import HERE, in_pieces, pool, step

HEADS, DIM, GROUPS, SIZE = 6, 5, 2, 7
SPEC = StateSpaceSpec(0, 0.0, math.inf)
FAST = state_space.bind("cpu")
EXACT = state_space.bind("cpu", deterministic=True)


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """What has a row a token, and the weights of heads; decays from almost none to almost all."""
    rows = [torch.randn(tokens, HEADS, DIM), torch.randn(tokens, HEADS)]
    rows += [torch.randn(tokens, GROUPS, SIZE), torch.randn(tokens, GROUPS, SIZE)]
    weights = [torch.randn(HEADS) - 2, torch.randn(HEADS), torch.randn(HEADS)]
    return [one.to(dtype) for one in rows], [one.to(dtype) for one in weights]


def oracle(rows: list[Tensor], weights: list[Tensor], lengths: list[int], least: float, most: float) -> Tensor:
    """One number of time and one matrix after another, in float64."""
    x, dt, b, c = (one.double() for one in rows)
    bias, a_log, skip = (one.double() for one in weights)
    b, c = (one[:, torch.arange(HEADS) // (HEADS // GROUPS)] for one in (b, c))
    steps = torch.log1p(torch.exp(dt + bias)).clamp(least, most)
    result, token = torch.empty_like(x), 0
    for length in lengths:
        state = torch.zeros(HEADS, DIM, SIZE, dtype=torch.float64)
        for _ in range(length):
            taken = torch.einsum("hp,hn->hpn", steps[token, :, None] * x[token], b[token])
            state = torch.exp(-steps[token] * a_log.exp())[:, None, None] * state + taken
            result[token] = torch.einsum("hpn,hn->hp", state, c[token]) + skip[:, None] * x[token]
            token += 1
    return result


@pytest.fixture(scope="module")
def long() -> tuple[list[Tensor], list[Tensor], Tensor]:
    torch.manual_seed(1)
    rows, weights = inputs(2071)
    return rows, weights, oracle(rows, weights, [2000, 1, 70], 0.0, math.inf)


@pytest.mark.parametrize("run", [FAST, EXACT], ids=["chunks", "recurrence"])
def test_two_thousand_tokens_stay_with_the_recurrence_in_float64(run: Operation, long: Any) -> None:
    rows, weights, wanted = long
    found = run(*rows, *weights, step([2000, 1, 70]), SPEC)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (found - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("spec", [SPEC, StateSpaceSpec(0, 0.05, 0.3)], ids=["free", "limited"])
@pytest.mark.parametrize("run", [state_space.reference, FAST, EXACT], ids=["reference", "chunks", "recurrence"])
def test_pieces_of_sequences_equal_the_whole(run: Any, spec: StateSpaceSpec) -> None:
    lengths, cuts = [70, 1, 9], [(65, 0, 3), (0, 1, 0), (1, 0, 5), (4, 0, 1)]
    rows, weights = inputs(80)
    wanted = oracle(rows, weights, lengths, spec.least, spec.most)
    states = pool(5, ((1,), torch.float32), ((HEADS, DIM, SIZE), torch.float32))
    found, slots = in_pieces(run, rows, [*weights, HERE, spec], lengths, states, cuts)
    assert (found - wanted).abs().max() < 1e-4
    held = states.tensors[0][1]
    assert held[slots.long()].isfinite().all()
    others = [row for row in range(5) if row not in slots.tolist()]
    assert held[others].isnan().all()


def test_the_exact_form_has_the_same_bits_however_a_prompt_is_divided() -> None:
    rows, weights = inputs(30)
    whole = EXACT(*rows, *weights, step([21, 9]), SPEC)
    states = pool(3, ((1,), torch.float32), ((HEADS, DIM, SIZE), torch.float32))
    cuts = [(20, 0), (0, 2), (1, 4), (0, 3)]
    found, _ = in_pieces(EXACT, rows, [*weights, HERE, SPEC], [21, 9], states, cuts)
    assert torch.equal(found, whole)
    alone = EXACT(*(one[21:] for one in rows), *weights, step([9]), SPEC)
    assert torch.equal(alone, whole[21:])


def test_sixteen_bits_are_rounded_once() -> None:
    rows, weights = inputs(90, torch.bfloat16)
    wanted = oracle(rows, weights, [90], 0.0, math.inf)
    for run in (FAST, EXACT):
        found = run(*rows, *weights, step([90]), SPEC)
        assert found.dtype == torch.bfloat16
        assert ((found - wanted).abs() <= wanted.abs() / 200 + 1e-3).all()


@pytest.mark.parametrize("run", [FAST, EXACT], ids=["chunks", "recurrence"])
def test_a_sequence_with_nan_fails_alone(run: Operation) -> None:
    rows, weights = inputs(20)
    wanted = run(*(one[12:] for one in rows), *weights, step([8]), SPEC)
    for one in rows:
        one[:12] = math.nan
    found = run(*rows, *weights, step([12, 8]), SPEC)
    assert found[:12].isnan().all()
    assert torch.allclose(found[12:], wanted, atol=1e-5)


def test_padding_sequences_may_share_a_row() -> None:
    """They begin anew each time, so that nothing grows or spreads there."""
    rows, weights = inputs(4)
    states = FixedStates(
        pool(3, ((1,), torch.float32), ((HEADS, DIM, SIZE), torch.float32)).tensors,
        torch.tensor([2, 0, 0, 0], dtype=torch.int32),
    )
    found = FAST(*rows, *weights, step([1, 1, 1, 1], None, states), SPEC)
    assert torch.allclose(found, FAST(*rows, *weights, step([1, 1, 1, 1]), SPEC))
    assert states.tensors[0][1][1].isnan().all()


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(2)
    rows, weights = inputs(5, torch.float64)
    given = [one.requires_grad_() for one in (*rows, *weights)]
    assert torch.autograd.gradcheck(lambda *args: state_space(*args, step([3, 2]), SPEC), given, fast_mode=True)
    x, gate = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    for gate_first in (True, False):
        assert torch.autograd.gradcheck(
            lambda *args, f=gate_first: gated_rms_norm(*args, 1e-5, 4, f), (x, gate, weight)
        )


def test_gradients_through_many_chunks_are_those_of_the_recurrence() -> None:
    rows, weights = inputs(150, torch.float64)
    given = [one.requires_grad_() for one in (*rows, *weights)]
    pull = torch.randn(150, HEADS, DIM, dtype=torch.float64)
    # The definition writes its results in place, which autograd follows.
    found = [
        torch.autograd.grad((run(*given, step([140, 10]), SPEC) * pull).sum(), given)
        for run in (state_space, state_space.reference)
    ]
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9 * max(1, other.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norms_have_the_bits_of_transformers(dtype: torch.dtype) -> None:
    x, gate = (torch.randn(9, 24).to(dtype) for _ in range(2))
    theirs = MambaRMSNormGated(24, group_size=8, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    assert torch.equal(gated_rms_norm(x, gate, theirs.weight, 1e-5, 8, True), theirs(x, gate))
    after = Qwen3NextRMSNormGated(24, eps=1e-6).to(dtype)
    torch.nn.init.normal_(after.weight)
    assert torch.equal(gated_rms_norm(x, gate, after.weight, 1e-6, 24, False), after(x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_gated_norms_stand_alone(dtype: torch.dtype) -> None:
    x, gate, weight = torch.randn(ROWS, 66).to(dtype), torch.randn(ROWS, 66).to(dtype), torch.randn(66).to(dtype)
    run = gated_rms_norm.bind("cpu", deterministic=True)
    for gate_first in (True, False):
        assert_rows_stand_alone(lambda rows, f=gate_first: run(x[rows], gate[rows], weight, 1e-5, 22, f))


def test_costs_are_the_hand_counts() -> None:
    """Three sequences: one begins, one goes on, one does not run."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    workload = Workload((6, 1, 0), (6, 9, 4))
    states = FixedStates(((meta(3, 1), meta(3, HEADS, DIM, SIZE, dtype=torch.float32)),), meta(3))
    rows = [meta(7, HEADS, DIM), meta(7, HEADS), meta(7, GROUPS, SIZE), meta(7, GROUPS, SIZE)]
    weights = [meta(HEADS), meta(HEADS), meta(HEADS)]
    # decay, take up (2), give (2) of 35 numbers; step times x, skip (2) of 5; 6 for the time step
    flops = 7 * 6 * (5 * 35 + 3 * 5 + 6)
    read = 2 * (7 * 30 + 7 * 6 + 2 * 7 * 14 + 3 * 6)
    state = 6 * 35 * 4
    whole = step([7])
    assert state_space.cost(*rows, *weights, whole, SPEC, workload=Workload((7,), (7,))) == Cost(flops, read, 420, 36)
    kept = state_space.cost(*rows, *weights, step([6, 1, 0], None, states), SPEC, workload=workload)
    assert kept == Cost(flops, read + state, 420 + 2 * state, 36, 3 * state)
    x = meta(7, 64)
    found = gated_rms_norm.cost(x, x, meta(64), 1e-5, 16, True, workload=workload)
    assert found == Cost(9 * 7 * 64, 2 * 896 + 128, 896, 128)
    assert state_space(*rows, *weights, whole, SPEC).shape == (7, HEADS, DIM)
