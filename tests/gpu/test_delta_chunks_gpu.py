"""Prompts of the gated delta rule on a GPU, in parallel chunks: near float64, in pieces, recorded in a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.state.fixed import FixedStates
from strata.models.batch import Batch
from tests.kernels.recurrent.steps import step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

# Of the largest number, and of the root of the mean square: with all that is multiplied rounded to bfloat16, a result
# once more, random rows are 9e-3 and 5e-3 from float64 (the roundings, done by hand).
TOLERANCE = (1.5e-2, 8e-3)
# Keys that come again and again overwrite what they put there a moment ago: 2.3e-2 and 1.3e-2.
REPEATED = (5e-2, 2.5e-2)
# Key heads, heads and their dimensions.
SIZES = [(4, 8, 128, 128), (3, 3, 64, 64), (2, 4, 48, 80), (1, 2, 20, 36)]


def inputs(tokens: int, sizes: tuple[int, ...], bias: float = -3.0) -> tuple[list[Tensor], list[Tensor]]:
    """Rows, parts of one wider product each, and the weights of heads, in bfloat16. Keys are alike."""
    key_heads, heads, key_dim, value_dim = sizes
    parts = [key_heads * key_dim, key_heads * key_dim, heads * value_dim, 8]
    joined = torch.randn(tokens, sum(parts))
    joined[:, parts[0] : 2 * parts[0]] += 1
    q, k, v, _ = joined.bfloat16().split(parts, 1)
    a, b = torch.randn(tokens, 2 * heads).bfloat16().split(heads, 1)
    rows = [q.unflatten(1, (key_heads, -1)), k.unflatten(1, (key_heads, -1)), v.unflatten(1, (heads, -1)), a, b + 1]
    return rows, [(torch.randn(heads) + bias).bfloat16(), torch.randn(heads).bfloat16()]


def on_gpu(batch: Batch, states: FixedStates | None = None) -> Batch:
    moved = {name: getattr(batch, name).cuda() for name in ("tokens", "positions", "offsets")}
    return replace(batch, states=states, **moved)


def kept_states(sequences: int, sizes: tuple[int, ...]) -> tuple[FixedStates, FixedStates]:
    """The same in float64 on the host and in float32 on the device; a sequence's row is the last but its number."""
    kept, slots = torch.randn(sequences + 1, *sizes[1:]), torch.arange(sequences, 0, -1, dtype=torch.int32)
    of_device = FixedStates(((kept[:0].cuda(), kept.cuda()),), slots.cuda())
    return FixedStates(((kept[:0], kept.double()),), slots), of_device


def run(rows: Sequence[Tensor], weights: Sequence[Tensor], batch: Batch) -> Tensor:
    given = [one.cuda() if not one.is_cuda else one for one in (*rows, *weights)]
    bound = gated_delta.bind("cuda")
    assert bound.choose(*given, batch, 0).name == "triton parallel chunks"
    return bound(*given, batch, 0)


def is_near(found: Tensor, wanted: Tensor, tolerance: tuple[float, float] = TOLERANCE) -> bool:
    error = found.cpu() - wanted
    largest = error.abs().max() <= tolerance[0] * wanted.abs().max()
    return bool(largest & (error.square().mean() <= tolerance[1] ** 2 * wanted.square().mean()))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lengths", [(128,), (191, 1, 64), (65, 0, 300, 127)])
def test_results_and_states_are_near_float64(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    rows, weights = inputs(sum(lengths), sizes)
    wide = [one.double() for one in (*rows, *weights)]
    assert is_near(run(rows, weights, on_gpu(step(lengths))), gated_delta.reference(*wide, step(lengths), 0))
    starts = [3 * (number % 2) for number in range(len(lengths))]  # every other one begins
    host, device = kept_states(len(lengths), sizes)
    wanted = gated_delta.reference(*wide, step(lengths, starts, host), 0)
    assert is_near(run(rows, weights, on_gpu(step(lengths, starts), device)), wanted)
    assert is_near(device.tensors[0][1], host.tensors[0][1])


@pytest.mark.parametrize("bias", [-8.0, 0.0, 8.0])
def test_weak_and_strong_decays_of_keys_that_come_again(bias: float) -> None:
    """Four keys, and strengths near 1: with strong decays nothing of a state is left behind a token."""
    sizes = SIZES[0]
    rows, weights = inputs(500, sizes, bias)
    rows[1] = rows[1][torch.randint(0, 4, (500,))]
    rows[4] = rows[4] + 3
    wanted = gated_delta.reference(*(one.double() for one in (*rows, *weights)), step([500]), 0)
    assert is_near(run(rows, weights, on_gpu(step([500]))), wanted, REPEATED)


def test_pieces_of_a_prompt_are_near_the_whole() -> None:
    sizes = SIZES[0]
    rows, weights = inputs(600, sizes)
    wanted = gated_delta.reference(*(one.double() for one in (*rows, *weights)), step([600]), 0)
    kept = torch.full((1, *sizes[1:]), torch.nan, device="cuda")
    states = FixedStates(((kept[:0], kept),), torch.zeros(1, dtype=torch.int32, device="cuda"))
    parts, done = [], 0
    for count in (200, 129, 271):
        batch = on_gpu(step([count], [done]), states)
        parts.append(run([one[done : done + count] for one in rows], weights, batch))
        done += count
    assert is_near(torch.cat(parts), wanted)


def test_a_recorded_step_runs_other_lengths_of_its_shapes() -> None:
    """Lengths, positions and rows of states are what a replay finds in the same memory."""
    sizes, most = SIZES[0], 512
    rows, weights = inputs(most, sizes)
    given = [one.cuda() for one in (*rows, *weights)]
    _, states = kept_states(4, sizes)
    begun = states.tensors[0][1].clone()
    batch = on_gpu(replace(step([most, 0, 0, 0]), longest=most), states)

    def set_to(lengths: Sequence[int], starts: Sequence[int]) -> None:
        other = step(lengths, starts)
        batch.offsets.copy_(other.offsets)
        batch.positions.copy_(other.positions)
        states.tensors[0][1].copy_(begun)

    bound: Any = gated_delta.bind("cuda")
    bound(*given, batch, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = bound(*given, batch, 0)
    for lengths, starts in (
        ([512, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 65, 382, 64], [7, 0, 9, 0]),
        ([0, 200, 0, 312], [5] * 4),
    ):
        set_to(lengths, starts)
        graph.replay()
        mine, kept = found.clone(), states.tensors[0][1].clone()
        set_to(lengths, starts)
        assert torch.equal(mine, bound(*given, on_gpu(step(lengths, starts), states), 0))
        assert torch.equal(kept, states.tensors[0][1])
