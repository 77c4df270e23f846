"""Recurrent operations on a GPU: both implementations against float64, states as they are left, bits of deterministic
mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.activation.sigmoid_gate import sigmoid_gate
from strata.kernels.op import Operation
from strata.kernels.recurrent.calls import StateSpaceSpec
from strata.kernels.recurrent.deinterleave import deinterleave
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.recurrent.gated_norm import gated_rms_norm
from strata.kernels.recurrent.short_convolution import short_convolution
from strata.kernels.recurrent.state_space import state_space
from strata.kernels.state.fixed import FixedStates
from strata.models.batch import Batch
from tests.kernels.recurrent.steps import step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

# Products of float32 in chunks of 16-bit inputs run in tf32.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 2e-5}
SPEC = StateSpaceSpec(0, 0.0, math.inf)
# What has a row a token, weights, what follows the batch, and shapes of the states.
Call = tuple[Operation, list[Tensor], list[Any], list[Any], list[tuple[int, ...]]]


def calls(tokens: int) -> dict[str, Call]:
    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))

    space = [some(tokens, 24, 64), some(tokens, 24), some(tokens, 2, 128), some(tokens, 2, 128)]
    odd = [some(tokens, 6, 40), some(tokens, 6), some(tokens, 3, 20), some(tokens, 3, 20)]
    delta = [some(tokens, 4, 128), some(tokens, 4, 128) + 1, some(tokens, 8, 128), some(tokens, 8), some(tokens, 8)]
    return {
        "convolution": (
            short_convolution,
            [some(tokens, 1000)],
            [some(1000, 1, 4), some(1000)],
            [0, True],
            [(1000, 3)],
        ),
        "state space": (state_space, space, [some(24) - 2, some(24), some(24)], [SPEC], [(1,), (24, 64, 128)]),
        "odd state space": (state_space, odd, [some(6) - 2, some(6), some(6)], [SPEC], [(1,), (6, 40, 20)]),
        "gated delta": (gated_delta, delta, [some(8) - 3, some(8)], [0], [(1,), (8, 128, 128)]),
    }


def run(call: Call, lengths: Sequence[int], kept: bool, dtype: torch.dtype, device: str, exact: bool) -> list[Tensor]:
    """The result and, if states are kept, what stands there behind it; sequences go on from position 3."""
    operation, rows, weights, behind, shapes = call
    batch: Batch = step(lengths)
    if kept:
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn(len(lengths) + 1, *shape, generator=generator) for shape in shapes]
        slots = torch.arange(len(lengths), 0, -1, dtype=torch.int32)
        of_layer = tuple(one.to(device, torch.float64 if device == "cpu" else torch.float32) for one in tensors)
        batch = replace(step(lengths, [3] * len(lengths)), states=FixedStates((of_layer,), slots.to(device)))
    moved = replace(batch, **{name: getattr(batch, name).to(device) for name in ("tokens", "positions", "offsets")})
    arguments = [one.to(dtype).to(device) for one in (*rows, *weights)]
    bound = operation.reference if device == "cpu" else operation.bind("cuda", deterministic=exact)
    if device == "cpu":
        arguments = [one.double() for one in arguments]
    found = [bound(*arguments, moved, *behind)]
    return found if moved.states is None else [*found, moved.states.tensors[0][-1]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", calls(1))
@pytest.mark.parametrize("lengths", [(200, 1, 33), (1,) * 70])
def test_results_and_states_are_near_float64(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    call = calls(sum(lengths))[name]
    for kept in (False, True):
        wanted = run(call, lengths, kept, dtype, "cpu", exact=False)
        for exact in (False, True):
            for one, other in zip(run(call, lengths, kept, dtype, "cuda", exact), wanted, strict=True):
                assert (one.cpu() - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()


@pytest.mark.parametrize("name", calls(1))
def test_bits_depend_neither_on_company_nor_on_pieces(name: str) -> None:
    operation, rows, weights, behind, shapes = calls(150)[name]
    bound = operation.bind("cuda", deterministic=True)
    given = [one.bfloat16().cuda() for one in (*rows, *weights)]
    rows, weights = given[: len(rows)], given[len(rows) :]

    def on_gpu(batch: Batch) -> Batch:
        return replace(batch, **{field: getattr(batch, field).cuda() for field in ("tokens", "positions", "offsets")})

    wanted = bound(*rows, *weights, on_gpu(step([100, 50])), *behind)
    tensors = tuple(torch.full((1, *shape), torch.nan, device="cuda") for shape in shapes)
    if operation is short_convolution:
        tensors = tuple(one.bfloat16() for one in tensors)
    states = FixedStates((tensors,), torch.zeros(1, dtype=torch.int32, device="cuda"))
    done, parts = 0, []
    for count in (37, 1, 1, 61):
        batch = on_gpu(step([count], [done], states))
        parts.append(bound(*(one[done : done + count] for one in rows), *weights, batch, *behind))
        done += count
    assert torch.equal(torch.cat(parts), wanted[:100])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gated_norms_are_near_float64(dtype: torch.dtype) -> None:
    x, gate, weight = (one.to(dtype) for one in torch.randn(3, 70, 1536).unbind())
    for gate_first in (True, False):
        given = (1e-5, 512, gate_first)
        wanted = gated_rms_norm.reference(x.double(), gate.double(), weight[0].double(), *given)
        found = gated_rms_norm.bind("cuda", deterministic=True)(x.cuda(), gate.cuda(), weight[0].cuda(), *given)
        assert (found.cpu() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", [(128, 128, 256, 256), (2, 2), (5, 3, 9)])
def test_columns_are_brought_together(parts: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(70, 16 * sum(parts) + 64).to(dtype)[:, 32:-32].unflatten(1, (16, -1))
    found = deinterleave.bind("cuda", deterministic=True)(x.cuda(), parts)
    assert torch.equal(found.cpu(), deinterleave.reference(x, parts))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gates_are_near_float64(dtype: torch.dtype) -> None:
    """Of heads, each beside its query, and one for a row, behind a product of odd width."""
    heads, joined = torch.randn(70, 16, 256).to(dtype), torch.randn(70, 16, 512).to(dtype)
    row, scores = torch.randn(70, 2048).to(dtype), torch.randn(70, 513).to(dtype)
    for x, gate in ((heads, joined[..., 256:]), (row, scores[:, 512:])):
        found = sigmoid_gate.bind("cuda", deterministic=True)(x.cuda(), gate.cuda())
        wanted = sigmoid_gate.reference(x.double(), gate.double())
        assert (found.cpu() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()
