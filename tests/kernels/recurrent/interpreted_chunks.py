"""The gated delta rule in parallel chunks in Triton's interpreter: how far it is from float64, as JSON.

Keys are alike, so that they overwrite much; rows are strided, and results and scratch memory poisoned before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strata.kernels.recurrent import delta_chunks_cuda
from strata.kernels.recurrent.calls import GatedDeltaCall
from strata.kernels.recurrent.delta_chunks_cuda import ColumnTile, DeltaTiles
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.state.fixed import FixedStates
from tests.kernels.interpreter import prepare_interpreter
from tests.kernels.recurrent.steps import HERE, in_pieces, pool, step

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


def states_of(layer: Layer, slots: list[int], fresh: list[int], dtype: torch.dtype) -> FixedStates:
    """The same numbers in each call, and NaN in rows of sequences that begin, and in one of none."""
    kept = torch.randn(len(slots) + 1, *layer.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    kept[[*(slots[one] for one in fresh), len(slots)]] = torch.nan
    return FixedStates(((torch.empty(0), kept),), torch.tensor(slots, dtype=torch.int32))


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


def main() -> None:
    prepare_interpreter()
    torch.manual_seed(1)
    torch.set_deterministic_debug_mode("warn")  # what is only allocated holds NaN
    found = {
        "one token": whole([1], 1, 1, 16, 16),
        "a chunk but one": whole([63], 1, 1, 16, 16),
        "a chunk": whole([64], 1, 1, 16, 16),
        "a chunk and one": whole([65], 1, 1, 16, 16),
        "two hundred": whole([200], 1, 2, 128, 128),
        "many": whole([127, 1, 0, 64, 33, 129, 0], 2, 2, 7, 5),
        "odd heads": whole([150], 1, 2, 48, 80, tiles=NARROW),
        "kept": kept([70, 1, 0, 130, 65, 64], [0, 3, 2, 7, 0, 1], 1, 2, 20, 36),
        "kept in columns": kept([66, 130], [5, 0], 2, 2, 48, 80, tiles=NARROW),
        "pieces": divided([190, 1, 75], [(65, 0, 3), (0, 1, 0), (61, 0, 71), (64, 0, 1)], 1, 2, 24, 40),
        "alone": alone(),
        "inverses in float16": halves(150),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
