"""Recurrent operations and the short convolution: equal to the recurrence in float64, in pieces, in any company."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated, causal_conv1d_fn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated, torch_recurrent_gated_delta_rule

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import Operation
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.recurrent.gated_norm import gated_rms_norm
from strata.kernels.recurrent.sequences import StateSpaceSpec
from strata.kernels.recurrent.short_convolution import short_convolution
from strata.kernels.recurrent.state_space import state_space
from strata.kernels.state.recurrent import RecurrentStates
from tests.kernels.launches.noted import empty as meta

from .steps import HERE, in_pieces, pool, step

Given = tuple[list[Tensor], list[Tensor]]
CHANNELS, WIDTH = 11, 4
HEADS, DIM, GROUPS, SIZE = 6, 5, 2, 7  # of the state space; of the delta rule values, key heads and keys


@dataclass(frozen=True)
class Subject:
    """inputs: what has a row a token, and weights, for so many tokens. oracle: of these and lengths, in float64.
    behind: what follows the batch. states: shapes of what is kept. tolerance: of float32."""

    operation: Operation
    inputs: Callable[[int], Given]
    oracle: Callable[[list[Tensor], list[Tensor], list[int]], Tensor]
    behind: tuple[Any, ...]
    states: tuple[tuple[int, ...], ...]
    tolerance: float = 1e-5

    @property
    def ways(self) -> dict[str, Any]:
        bind = self.operation.bind
        return {"reference": self.operation.reference, "fast": bind("cpu"), "exact": bind("cpu", deterministic=True)}

    def run(self, way: str, given: Given, lengths: list[int]) -> Tensor:
        found: Tensor = self.ways[way](*given[0], *given[1], step(lengths), *self.behind)
        return found

    def in_pieces(self, way: str, given: Given, lengths: list[int], cuts: Any, rows: int) -> tuple[Tensor, Tensor, Any]:
        """The results, the rows that sequences had of so many, and what is kept in all."""
        dtype = given[0][0].dtype if self.operation is short_convolution else torch.float32
        states = pool(rows, *((shape, dtype) for shape in self.states))
        found, slots = in_pieces(self.ways[way], given[0], [*given[1], HERE, *self.behind], lengths, states, cuts)
        return found, slots, states.tensors[0][-1]


def delta_inputs(tokens: int) -> Given:
    """Keys of a sequence are alike, so that they overwrite much."""
    rows = [torch.randn(tokens, GROUPS, SIZE), torch.randn(tokens, GROUPS, SIZE) + 1]
    rows += [torch.randn(tokens, HEADS, DIM), torch.randn(tokens, HEADS), torch.randn(tokens, HEADS) + 1]
    return rows, [torch.randn(HEADS) - 3, torch.randn(HEADS)]


def delta_oracle(rows: list[Tensor], weights: list[Tensor], lengths: list[int]) -> Tensor:
    """One matrix after another."""
    q, k, v, a, b = (one.double() for one in rows)
    bias, a_log = (one.double() for one in weights)
    decays = torch.exp(-torch.exp(a_log) * torch.log1p(torch.exp(a + bias)))
    q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    q, k = (one[:, torch.arange(HEADS) // (HEADS // GROUPS)] for one in (q, k))
    result, token = torch.empty_like(v), 0
    for length in lengths:
        state = torch.zeros(HEADS, SIZE, DIM, dtype=torch.float64)
        for _ in range(length):
            left = decays[token, :, None, None] * state
            change = (v[token] - torch.einsum("hkv,hk->hv", left, k[token])) / (1 + torch.exp(-b[token, :, None]))
            state = left + torch.einsum("hk,hv->hkv", k[token], change)
            result[token] = torch.einsum("hkv,hk->hv", state, q[token]) / SIZE**0.5
            token += 1
    return result


def space_inputs(tokens: int) -> Given:
    """Decays from almost none to almost all."""
    rows = [torch.randn(tokens, HEADS, DIM), torch.randn(tokens, HEADS)]
    rows += [torch.randn(tokens, GROUPS, SIZE), torch.randn(tokens, GROUPS, SIZE)]
    return rows, [torch.randn(HEADS) - 2, torch.randn(HEADS), torch.randn(HEADS)]


def space_oracle(least: float, most: float) -> Callable[[list[Tensor], list[Tensor], list[int]], Tensor]:
    """One number of time and one matrix after another."""

    def oracle(rows: list[Tensor], weights: list[Tensor], lengths: list[int]) -> Tensor:
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

    return oracle


def convolution_inputs(tokens: int) -> Given:
    return [torch.randn(tokens, CHANNELS)], [torch.randn(CHANNELS, 1, WIDTH), torch.randn(CHANNELS)]


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], silu: bool) -> Tensor:
    """As transformers computes it, each sequence on its own, in float64."""
    wide = None if bias is None else bias.double()
    parts = [
        causal_conv1d_fn(one.T[None].double(), weight[:, 0].double(), wide, "silu" if silu else None)[0].T
        for one in x.split(lengths)
        if len(one)
    ]
    return torch.cat(parts)


SPEC, LIMITED = StateSpaceSpec(0, 0.0, math.inf), StateSpaceSpec(0, 0.05, 0.3)
SPACE = ((1,), (HEADS, DIM, SIZE))
SUBJECTS = {
    "gated delta": Subject(gated_delta, delta_inputs, delta_oracle, (0,), ((1,), (HEADS, SIZE, DIM))),
    "state space": Subject(state_space, space_inputs, space_oracle(0.0, math.inf), (SPEC,), SPACE, 1e-4),
    "limited state space": Subject(state_space, space_inputs, space_oracle(0.05, 0.3), (LIMITED,), SPACE, 1e-4),
    "convolution": Subject(
        short_convolution,
        convolution_inputs,
        lambda rows, weights, lengths: convolved(*rows, *weights, lengths, True),
        (0, True),
        ((CHANNELS, WIDTH - 1),),
    ),
}
RECURRENCES = ("gated delta", "state space")
every_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
recurrences = pytest.mark.parametrize("subject", [SUBJECTS[name] for name in RECURRENCES], ids=RECURRENCES)
every_way = pytest.mark.parametrize("way", ["reference", "fast", "exact"])


def in_dtype(given: Given, dtype: torch.dtype) -> Given:
    rows, weights = ([one.to(dtype) for one in some] for some in given)
    return rows, weights


@recurrences
def test_two_thousand_tokens_stay_with_the_recurrence_in_float64(subject: Subject) -> None:
    given = subject.inputs(2071)
    wanted = subject.oracle(*given, [2000, 1, 70])
    assert wanted.abs().max() > 0.3
    for way in ("fast", "exact"):
        found = subject.run(way, given, [2000, 1, 70])
        assert (found - wanted).abs().max() < 1e-4 * min(1.0, wanted.abs().max().item())


@every_way
@every_subject
def test_pieces_of_sequences_equal_the_whole(subject: Subject, way: str) -> None:
    lengths, cuts = [70, 1, 9], [(65, 0, 3), (0, 1, 0), (1, 0, 5), (4, 0, 1)]
    given = subject.inputs(80)
    found, slots, held = subject.in_pieces(way, given, lengths, cuts, 5)
    assert (found - subject.oracle(*given, lengths)).abs().max() < subject.tolerance
    assert (subject.run(way, given, lengths) - found).abs().max() < subject.tolerance
    assert held[slots.long()].isfinite().all()
    assert held[[row for row in range(5) if row not in slots.tolist()]].isnan().all()


@every_subject
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exact_form_has_the_same_bits_however_a_prompt_is_divided(subject: Subject, dtype: torch.dtype) -> None:
    given = in_dtype(subject.inputs(40), dtype)
    whole = subject.run("exact", given, [21, 10, 9])
    cuts = [(20, 0, 0), (0, 2, 3), (1, 4, 6), (0, 4, 0)]
    if dtype == torch.float32 or subject.operation is short_convolution:
        assert torch.equal(subject.in_pieces("exact", given, [21, 10, 9], cuts, 4)[0], whole)
    alone = [one[31:] for one in given[0]], given[1]
    assert torch.equal(subject.run("exact", alone, [9]), whole[31:])


@every_subject
def test_sixteen_bits_are_rounded_once(subject: Subject) -> None:
    given = in_dtype(subject.inputs(90), torch.bfloat16)
    wanted = subject.oracle(*given, [90])
    for way in ("fast", "exact"):
        found = subject.run(way, given, [90])
        assert found.dtype == torch.bfloat16
        assert ((found - wanted).abs() <= wanted.abs() / 200 + 1e-3).all()


@every_way
@recurrences
def test_a_sequence_with_nan_fails_alone(subject: Subject, way: str) -> None:
    rows, weights = subject.inputs(20)
    wanted = subject.run(way, ([one[12:] for one in rows], weights), [8])
    for one in rows:
        one[:12] = torch.nan
    found = subject.run(way, (rows, weights), [12, 8])
    assert found[:12].isnan().all()
    assert torch.allclose(found[12:], wanted, atol=1e-5)


@recurrences
def test_gradients_through_many_chunks_are_those_of_the_recurrence(subject: Subject) -> None:
    given = [one.requires_grad_() for some in in_dtype(subject.inputs(150), torch.float64) for one in some]
    pull = torch.randn(150, HEADS, DIM, dtype=torch.float64)
    # The definition writes its results in place, which autograd follows.
    runs = (subject.operation, subject.operation.reference)
    found = [torch.autograd.grad((run(*given, step([140, 10]), *subject.behind) * pull).sum(), given) for run in runs]
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-9 * max(1, other.abs().max().item()))


@pytest.mark.parametrize("name", ["state space", "convolution"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    subject = SUBJECTS[name]
    given = [one.requires_grad_() for some in in_dtype(subject.inputs(5), torch.float64) for one in some]
    run = lambda *args: subject.operation(*args, step([3, 2]), *subject.behind)  # noqa: E731
    assert torch.autograd.gradcheck(run, given, fast_mode=True)


def test_the_delta_rule_is_that_of_transformers() -> None:
    subject = SUBJECTS["gated delta"]
    rows, weights = given = subject.inputs(30)
    decays = -weights[1].exp() * F.softplus(rows[3] + weights[0])
    whole = [one[None] for one in (*rows[:3], decays, rows[4].sigmoid())]
    wanted, _ = torch_recurrent_gated_delta_rule(*whole, use_qk_l2norm_in_kernel=True)
    for way in subject.ways:
        assert (subject.run(way, given, [30]) - wanted[0]).abs().max() < 1e-5


CONVOLUTIONS = SUBJECTS["convolution"].ways | {"gradients": short_convolution.bind("cpu", differentiable=True)}


@pytest.mark.parametrize(("width", "silu", "biased"), [(4, True, True), (3, False, True), (2, True, False)])
@pytest.mark.parametrize("run", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_equal_transformers_and_keep_what_they_end_with(
    run: Any, width: int, silu: bool, biased: bool
) -> None:
    x, weight = torch.randn(40, CHANNELS), torch.randn(CHANNELS, 1, width)
    bias = torch.randn(CHANNELS) if biased else None
    whole = run(x, weight, bias, step([28, 0, 1, 11]), 0, silu)
    assert (whole - convolved(x, weight, bias, [28, 1, 11], silu)).abs().max() < 1e-5
    states = pool(5, ((CHANNELS, width - 1), torch.float32))
    cuts = [(20, 0, 1), (1, 1, 2), (1, 0, 1), (6, 0, 7)]
    found, slots = in_pieces(run, [x], [weight, bias, HERE, 0, silu], [28, 1, 11], states, cuts)
    assert (found - whole).abs().max() < 1e-5
    (tails,) = states.tensors[0]
    ends = {0: x[28 - width + 1 : 28], 1: F.pad(x[28:29], (0, 0, width - 2, 0)), 2: x[40 - width + 1 :]}
    for number, wanted in ends.items():
        assert torch.equal(tails[slots[number]], wanted.T)
    assert tails[[0, 4]].isnan().all()


def test_padding_sequences_may_share_a_row() -> None:
    """They begin anew each time, so that nothing grows or spreads there."""
    rows, weights = space_inputs(4)
    of_pool = pool(3, *((shape, torch.float32) for shape in SPACE))
    states = RecurrentStates(of_pool.tensors, torch.tensor([2, 0, 0, 0], dtype=torch.int32))
    fast = state_space.bind("cpu")
    found = fast(*rows, *weights, step([1, 1, 1, 1], None, states), SPEC)
    assert torch.allclose(found, fast(*rows, *weights, step([1, 1, 1, 1]), SPEC))
    assert states.tensors[0][1][1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norms_have_the_bits_of_transformers(dtype: torch.dtype) -> None:
    x, gate = (torch.randn(9, 24).to(dtype) for _ in range(2))
    theirs = MambaRMSNormGated(24, group_size=8, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    assert torch.equal(gated_rms_norm(x, gate, theirs.weight, 1e-5, 8, True), theirs(x, gate))
    after = Qwen3NextRMSNormGated(24, eps=1e-6).to(dtype)
    torch.nn.init.normal_(after.weight)
    assert torch.equal(gated_rms_norm(x, gate, after.weight, 1e-6, 24, False), after(x, gate))


def test_costs_of_the_delta_rule_are_the_hand_counts() -> None:
    rows = [meta(7, GROUPS, SIZE), meta(7, GROUPS, SIZE), meta(7, HEADS, DIM), meta(7, 6), meta(7, 6)]
    # decay, read (2), put (2), read (2) of 35 numbers; correct 5 values (2); gates; 7 for each of 7 dimensions
    flops = 7 * (6 * (7 * 35 + 2 * 5 + 10) + 2 * 7 * 7)
    read = 2 * (2 * 7 * 14 + 7 * 30 + 2 * 7 * 6 + 2 * 6)
    found = gated_delta.cost(*rows, meta(6), meta(6), step([7]), 0, workload=Workload((7,), (7,)))
    assert found == Cost(flops, read, 420, 24)
    states = RecurrentStates(((meta(3, 1), meta(3, HEADS, SIZE, DIM, dtype=torch.float32)),), meta(3))
    workload = Workload((6, 1), (6, 4))
    kept = gated_delta.cost(*rows, meta(6), meta(6), step([6, 1], None, states), 0, workload=workload)
    assert kept == Cost(flops, read + 840, 420 + 2 * 840, 24, 3 * 840)


def test_costs_of_state_spaces_are_the_hand_counts() -> None:
    """Three sequences: one begins, one goes on, one does not run."""
    workload = Workload((6, 1, 0), (6, 9, 4))
    states = RecurrentStates(((meta(3, 1), meta(3, HEADS, DIM, SIZE, dtype=torch.float32)),), meta(3))
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
    assert state_space(*rows, *weights, whole, SPEC).shape == (7, HEADS, DIM)


def test_costs_of_convolutions_are_the_hand_counts() -> None:
    x, weight, bias = meta(7, 64), meta(64, 1, 4), meta(64)
    found = short_convolution.cost(x, weight, bias, step([7]), 0, True, workload=Workload((7,), (7,)))
    assert found == Cost(7 * 64 * (8 + 4), 896 + 512 + 128, 896, 512 + 128)
    found = short_convolution.cost(x, weight, None, step([7]), 0, False, workload=Workload((7,), (7,)))
    assert found == Cost(7 * 64 * 7, 896 + 512, 896, 512)
    states = RecurrentStates(((meta(9, 64, 3),),), meta(2))
    workload = Workload((6, 1, 0), (6, 4, 5))
    found = short_convolution.cost(x, weight, None, step([6, 1, 0], None, states), 0, False, workload=workload)
    assert found == Cost(7 * 64 * 7, 896 + 512 + 384, 896 + 2 * 384, 512, 3 * 384)
