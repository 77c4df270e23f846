"""The Triton kernels of recurrent operations in Triton's interpreter, against references: run by `test_interpreted`.

Sequences begin, go on, stand still and pad; rows that nobody has written are poisoned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.activation import sigmoid_gate
from strata.kernels.recurrent import (
    deinterleave,
    delta_chunks_cuda,
    gated_delta_triton,
    gated_norm,
    short_convolution,
    state_space,
    state_space_triton,
)
from strata.kernels.recurrent.delta_chunks_cuda import ColumnTile, DeltaTiles
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.recurrent.sequences import GatedDeltaCall, StateSpaceCall, StateSpaceSpec
from strata.kernels.rotary import rope as rope_file
from strata.kernels.rotary.rope import rope_angles
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch
from tests.kernels.recurrent.steps import HERE, in_pieces, pool, step

LENGTHS, STARTS, SLOTS, ROWS = [5, 1, 0, 19, 1], [0, 3, 2, 7, 0], [4, 1, 3, 0, 2], 6


def batch_of(*shapes: tuple[int, ...]) -> Batch:
    """The same numbers in each call, and NaN in rows of sequences that begin, and of none."""
    generator = torch.Generator().manual_seed(5)
    tensors = tuple(torch.randn(ROWS, *shape, generator=generator) for shape in shapes)
    for one in tensors:
        one[[SLOTS[0], SLOTS[4], 5]] = torch.nan
    return step(LENGTHS, STARTS, RecurrentStates((tensors,), torch.tensor(SLOTS, dtype=torch.int32)))


def compare(reference: Callable[..., Tensor], kernel: Callable[..., Tensor], *shapes: tuple[int, ...]) -> float:
    """The largest difference of results, and of all that is kept; and of whole sequences, of which nothing is."""
    worst = 0.0
    kept = [batch_of(*shapes), batch_of(*shapes)]
    whole = step([3, 17])
    for batches in (kept, [whole, whole]):
        wanted, found = reference(batches[0]), kernel(batches[1])
        assert found.isfinite().all()
        worst = max(worst, (wanted - found).abs().max().item())
    assert kept[0].states is not None
    assert kept[1].states is not None
    for wanted, found in zip(kept[0].states.tensors[0], kept[1].states.tensors[0], strict=True):
        assert torch.equal(wanted.isnan(), found.isnan())
        worst = max(worst, (wanted - found).nan_to_num().abs().max().item())
    return worst


def convolution(width: int, bias: bool, silu: bool) -> float:
    def run(operation: Callable[..., Tensor]) -> Callable[[Batch], Tensor]:
        def on(batch: Batch) -> Tensor:
            torch.manual_seed(1)
            x = torch.randn(len(batch.tokens), 29)[:, 3:24]
            weight, shift = torch.randn(21, 1, width), torch.randn(21)
            return operation(x, weight, shift if bias else None, batch, 0, silu)

        return on

    return compare(run(short_convolution.short_convolution.reference), run(short_convolution._triton), (21, width - 1))


def scan(heads: int, dim: int, groups: int, size: int, chunks: bool) -> float:
    spec = StateSpaceSpec(0, 0.01, math.inf)

    def run(operation: Callable[..., Tensor]) -> Callable[[Batch], Tensor]:
        def on(batch: Batch) -> Tensor:
            torch.manual_seed(1)
            tokens = len(batch.tokens)
            joined = torch.randn(tokens, heads * dim + 2 * groups * size + 3)
            x, b, c, _ = joined.split([heads * dim, groups * size, groups * size, 3], 1)
            b, c = (one.unflatten(1, (groups, size)) for one in (b, c))
            given = (x.unflatten(1, (heads, dim)), torch.randn(tokens, heads), b, c)
            return operation(*given, torch.randn(heads), torch.randn(heads), torch.randn(heads), batch, spec)

        return on

    def kernel(*args: Any) -> Tensor:
        call = StateSpaceCall(*args)
        assert state_space_triton.supports(call)
        return state_space_triton.launch(call, chunks=chunks)

    return compare(run(state_space.state_space.reference), run(kernel), (1,), (heads, dim, size))


def delta(key_heads: int, heads: int, key_dim: int, value_dim: int, chunks: bool) -> float:
    def run(operation: Callable[..., Tensor]) -> Callable[[Batch], Tensor]:
        def on(batch: Batch) -> Tensor:
            torch.manual_seed(1)
            tokens = len(batch.tokens)
            sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
            q, k, v = torch.randn(tokens, sum(sizes)).split(sizes, 1)
            q, k = (one.unflatten(1, (key_heads, key_dim)) for one in (q, k + 1))
            gates = torch.randn(tokens, 2 * heads).split(heads, 1)
            given = (q, k, v.unflatten(1, (heads, value_dim)), *gates)
            return operation(*given, torch.randn(heads) - 2, torch.randn(heads), batch, 0)

        return on

    def kernel(*args: Any) -> Tensor:
        call = GatedDeltaCall(*args)
        assert gated_delta_triton.supports(call)
        return gated_delta_triton.launch(call, chunks=chunks)

    return compare(run(gated_delta.reference), run(kernel), (1,), (heads, key_dim, value_dim))


def norm(gate_first: bool, heads: bool) -> float:
    torch.manual_seed(1)
    gate = torch.randn(7, 51)[:, :48]
    x, size = torch.randn(7, 48), 12
    if heads:
        x, gate = x.view(7, 4, 12), gate.unflatten(1, (4, 12))
    given = (x, gate, torch.randn(x.shape[-1]), 1e-5, size, gate_first)
    assert gated_norm._fits(*given)
    return (gated_norm._triton(*given) - gated_norm.gated_rms_norm.reference(*given)).abs().max().item()


def columns(groups: int, *parts: int) -> float:
    torch.manual_seed(1)
    x = torch.randn(7, groups * sum(parts) + 3)[:, 2:-1].unflatten(1, (groups, -1))
    assert deinterleave._fits(x, parts)
    return (deinterleave._triton(x, parts) - deinterleave.deinterleave.reference(x, parts)).abs().max().item()


def gates(*shape: int, shared: bool = False) -> float:
    """Gates, or one for a row, as parts of a wider product; NaN beside them."""
    torch.manual_seed(1)
    x, wide = torch.randn(shape), torch.full((*shape[:-1], 3 * shape[-1]), torch.nan)
    gate = wide[..., 1 : 2 if shared else 1 + shape[-1]].normal_()
    assert sigmoid_gate._fits(x, gate)
    return (sigmoid_gate._triton(x, gate) - sigmoid_gate.sigmoid_gate.reference(x, gate)).abs().max().item()


def rotation(heads: int, dims: int, kept: int) -> float:
    """Of heads that stand beside something else."""
    torch.manual_seed(1)
    x = torch.randn(7, heads, 2 * (dims + kept))[..., : dims + kept]
    given = x, *rope_angles.reference(torch.arange(7, 0, -1, dtype=torch.int32), torch.randn(9, dims))
    assert rope_file._fits(*given)
    return (rope_file._triton(*given) - rope_file.partial_rope.reference(*given)).abs().max().item()


CASES = {
    "convolution 4": partial(convolution, 4, True, True),
    "convolution 2": partial(convolution, 2, False, False),
    "recurrence": partial(scan, 2, 5, 2, 7, False),
    "recurrence of wide heads": partial(scan, 1, 20, 1, 128, False),
    "chunks": partial(scan, 4, 5, 2, 7, True),
    "chunks of wide heads": partial(scan, 1, 40, 1, 128, True),
    "delta": partial(delta, 1, 2, 7, 5, False),
    "delta in chunks of wide heads": partial(delta, 1, 1, 100, 40, True),
    "norm behind the gate": partial(norm, True, False),
    "norm before the gate": partial(norm, False, False),
    "norms of heads": partial(norm, False, True),
    "columns": partial(columns, 3, 5, 5, 12, 1),
    "columns of gates": partial(columns, 4, 3, 3),
    "rotation of a part": partial(rotation, 3, 6, 10),
    "rotation of most": partial(rotation, 5, 12, 2),
    "gates of heads": partial(gates, 5, 3, 20),
    "a gate of a row": partial(gates, 5, 1100, shared=True),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_their_references(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_space_triton, "_CHUNK", 16)  # so that few tokens are two chunks
    assert CASES[name]() <= 2e-4  # nor NaN


# Columns of states and results are divided among programs.
NARROW = DeltaTiles(4, ColumnTile(16), ColumnTile(16))


class Layer:
    """Rows of so many tokens, parts of one wider product each, and the weights of heads."""

    def __init__(
        self, tokens: int, key_heads: int, heads: int, key_dim: int, value_dim: int, tiles: DeltaTiles
    ) -> None:
        self.shape, self.tiles = (heads, key_dim, value_dim), tiles
        sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim, 3]
        q, k, v, _ = torch.randn(tokens, sum(sizes)).split(sizes, 1)
        q, k = (one.unflatten(1, (key_heads, key_dim)) for one in (q, k))
        k += 1
        a, b = torch.randn(tokens, 2 * heads).split(heads, 1)
        b += 1
        self.rows = [q, k, v.unflatten(1, (heads, value_dim)), a, b]
        self.weights = [torch.randn(heads) - 3, torch.randn(heads)]

    def run(self, *given: Any) -> Tensor:
        return delta_chunks_cuda.launch(GatedDeltaCall(*given), tiles=self.tiles)

    def oracle(self, batch: Any, rows: Sequence[Tensor]) -> Tensor:
        return gated_delta.reference(*(one.double() for one in (*rows, *self.weights)), batch, 0)


def states_of(layer: Layer, slots: list[int], fresh: list[int], dtype: torch.dtype) -> RecurrentStates:
    """The same numbers in each call, and NaN in rows of sequences that begin, and in one of none."""
    kept = torch.randn(len(slots) + 1, *layer.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    kept[[*(slots[one] for one in fresh), len(slots)]] = torch.nan
    return RecurrentStates(((torch.empty(0), kept),), torch.tensor(slots, dtype=torch.int32))


def whole(lengths: list[int], *sizes: int, tiles: DeltaTiles = delta_chunks_cuda.TILES) -> float:
    layer = Layer(sum(lengths), *sizes, tiles)
    batch = step(lengths)
    return (layer.run(*layer.rows, *layer.weights, batch, 0) - layer.oracle(batch, layer.rows)).abs().max().item()


def kept(lengths: list[int], starts: list[int], *sizes: int, tiles: DeltaTiles = delta_chunks_cuda.TILES) -> float:
    """Results, and the states behind them; of sequences that begin, go on or stand still."""
    layer = Layer(sum(lengths), *sizes, tiles)
    slots, fresh = list(range(len(lengths)))[::-1], [i for i, start in enumerate(starts) if not start]
    batches = [step(lengths, starts, states_of(layer, slots, fresh, one)) for one in (torch.float32, torch.float64)]
    found = layer.run(*layer.rows, *layer.weights, batches[0], 0)
    wanted = layer.oracle(batches[1], layer.rows)
    worst = (found - wanted).abs().max().item()
    mine, other = (batch.states.tensors[0][1] for batch in batches)  # type: ignore[union-attr]
    assert torch.equal(mine.isnan(), other.isnan())
    return max(worst, (mine - other).nan_to_num().abs().max().item())


def divided(lengths: list[int], cuts: list[tuple[int, ...]], *sizes: int) -> float:
    """A prompt in several steps, which need not end where chunks do, beside the whole."""
    layer = Layer(sum(lengths), *sizes, delta_chunks_cuda.TILES)
    states = pool(len(lengths) + 2, ((1,), torch.float32), (layer.shape, torch.float32))
    found, _ = in_pieces(layer.run, layer.rows, [*layer.weights, HERE, 0], lengths, states, cuts)
    return (found - layer.oracle(step(lengths), layer.rows)).abs().max().item()


def halves(length: int) -> float:
    """With inverses in float16, as they are for bfloat16."""
    solve = delta_chunks_cuda.gated_delta_solve_kernel

    class Halves:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **options: solve[grid](*given, **options | {"HALVES": True})

    delta_chunks_cuda.gated_delta_solve_kernel = Halves()
    found = whole([length], 1, 2, 32, 16)
    delta_chunks_cuda.gated_delta_solve_kernel = solve
    return found


def alone() -> float:
    """A sequence beside one that is not a number."""
    layer = Layer(150, 1, 2, 16, 16, delta_chunks_cuda.TILES)
    for one in layer.rows:
        one[:70] = torch.nan
    found = layer.run(*layer.rows, *layer.weights, step([70, 80]), 0)
    assert found[:70].isnan().all()
    return (found[70:] - layer.oracle(step([80]), [one[70:] for one in layer.rows])).abs().max().item()


CHUNKS = {
    "one token": partial(whole, [1], 1, 1, 16, 16),
    "a chunk but one": partial(whole, [63], 1, 1, 16, 16),
    "a chunk": partial(whole, [64], 1, 1, 16, 16),
    "a chunk and one": partial(whole, [65], 1, 1, 16, 16),
    "two hundred": partial(whole, [200], 1, 2, 128, 128),
    "many": partial(whole, [127, 1, 0, 64, 33, 129, 0], 2, 2, 7, 5),
    "odd heads": partial(whole, [150], 1, 2, 48, 80, tiles=NARROW),
    "kept": partial(kept, [70, 1, 0, 130, 65, 64], [0, 3, 2, 7, 0, 1], 1, 2, 20, 36),
    "kept in columns": partial(kept, [66, 130], [5, 0], 2, 2, 48, 80, tiles=NARROW),
    "pieces": partial(divided, [190, 1, 75], [(65, 0, 3), (0, 1, 0), (61, 0, 71), (64, 0, 1)], 1, 2, 24, 40),
    "alone": alone,
    "inverses in float16": partial(halves, 150),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_parallel_chunks_are_near_float64(name: str) -> None:
    """Keys are alike, so that they overwrite much; rows are strided."""
    assert CHUNKS[name]() <= (2e-3 if "float16" in name else 2e-4)  # nor NaN
