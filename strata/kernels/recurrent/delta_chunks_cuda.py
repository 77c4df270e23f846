"""The gated delta rule over prompts on CUDA: what its three kernels wait in, their tiles and their launches.

Grids follow from shapes alone, so that a step can be recorded in a CUDA graph: a step of so many tokens and sequences
has `tokens // 64 + sequences` tiles at most, and a program finds the chunk that it is given, if any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata.kernels.choose import MEASURED, thresholds, thresholds_of
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.recurrent import gated_delta_triton
from strata.kernels.recurrent.delta_chunks_triton import (
    CHUNK,
    gated_delta_results_kernel,
    gated_delta_solve_kernel,
    gated_delta_states_kernel,
)
from strata.kernels.recurrent.gated_delta_triton import LENGTH_EPS
from strata.kernels.recurrent.sequences import GatedDeltaCall, states_and_slots

KERNELS = (gated_delta_solve_kernel, gated_delta_states_kernel, gated_delta_results_kernel)


@dataclass(frozen=True)
class ColumnTile:
    """columns: of a head's values that a program has. stages: loads in flight, where there is a loop."""

    columns: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class DeltaTiles:
    """Of the three kernels."""

    solve_warps: int = 4
    states: ColumnTile = ColumnTile(64)
    results: ColumnTile = ColumnTile(128)


TILES = DeltaTiles()


@dataclass(frozen=True)
class _Sizes:
    """programs: chunks of heads at most, as many as `solve` has programs. key_dim, value_dim: padded."""

    programs: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int) -> _Sizes:
        padded = (max(16, next_power_of_2(dim)) for dim in (key_dim, value_dim))
        return _Sizes((tokens // CHUNK + sequences) * heads, *padded)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of what the kernels hand on: X, P and the state, and four vectors in float32."""
        elements = CHUNK * (CHUNK + self.value_dim) + self.key_dim * self.value_dim
        return self.programs * (elements * dtype.itemsize + 4 * CHUNK * 4)


def supports(call: GatedDeltaCall) -> bool:
    """A long sequence in bfloat16, and not many others beside it: of each sequence there is a tile at least, with a
    state that is written and read once more, where chunks of 16, one after another, hand nothing on."""
    q, k, v, batch = call.q, call.k, call.v, call.batch
    known = thresholds(q.device)
    each = known.parallel_chunk_tokens_each * (batch.offsets.shape[0] - 1)
    return (
        batch.longest >= max(known.parallel_chunk_tokens, each)
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and max(k.shape[2], v.shape[2]) <= 128
        and gated_delta_triton.supports(call)
    )


def scratch(call: GatedDeltaCall) -> int:
    """What the kernels hand on to each other."""
    v, sequences = call.v, call.batch.offsets.shape[0] - 1
    return _Sizes.of(v.shape[0], sequences, v.shape[1], call.k.shape[2], v.shape[2]).nbytes(v.dtype)


def scratch_bytes(tokens: int, sequences: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """The most that `scratch` is in a step of so many tokens and sequences at most."""
    known = thresholds_of(MEASURED)
    if tokens < known.parallel_chunk_tokens or dtype != torch.bfloat16:
        return 0
    sequences = min(sequences, tokens // known.parallel_chunk_tokens_each)
    return _Sizes.of(tokens, sequences, heads, key_dim, value_dim).nbytes(dtype)


def launch(call: GatedDeltaCall, tiles: DeltaTiles = TILES) -> Tensor:
    q, k, v, a, b, dt_bias, a_log, batch, layer = call
    key_heads, key_dim = k.shape[1:]
    heads, value_dim = v.shape[1:]
    result = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not result.numel():
        return result
    kept, slots = states_and_slots(batch, layer, v)
    sequences, shared = batch.offsets.shape[0] - 1, heads // key_heads
    sizes = _Sizes.of(v.shape[0], sequences, heads, key_dim, value_dim)
    programs, keys, values = sizes.programs, sizes.key_dim, sizes.value_dim
    inverses, puts = v.new_empty(programs, CHUNK, CHUNK), v.new_empty(programs, values, CHUNK)
    begins = v.new_empty(programs, values, keys)
    decays, weights, reads, lefts = v.new_empty(4, programs, CHUNK, dtype=torch.float32).unbind()
    padded: dict[str, Any] = {"CHUNK": CHUNK, "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32"}
    padded["KEY_DIM"] = keys
    gated_delta_solve_kernel[(programs,)](
        *(k, a, b, dt_bias, a_log, batch.offsets, inverses, decays, weights, reads, lefts),
        *(sequences, heads, key_dim, shared, k.stride(0), a.stride(0), b.stride(0), LENGTH_EPS),
        **padded,
        HALVES=v.dtype == torch.bfloat16,
        num_warps=tiles.solve_warps,
    )
    padded["VALUE_DIM"] = values
    own = _options(tiles.states, values)
    gated_delta_states_kernel[(ceil_div(value_dim, own["COLUMNS"]), heads, sequences)](
        *(k, v, inverses, decays, reads, lefts, puts, begins, kept, slots, batch.offsets, batch.positions),
        *(heads, key_dim, value_dim, shared, k.stride(0), v.stride(0), int(batch.states is not None)),
        **padded,
        **own,
    )
    own = _options(tiles.results, values)
    gated_delta_results_kernel[(programs * (values // own["COLUMNS"]),)](
        *(q, k, puts, decays, weights, begins, batch.offsets, result),
        *(sequences, heads, key_dim, value_dim, shared, q.stride(0), k.stride(0), LENGTH_EPS, key_dim**-0.5),
        **padded,
        **own,
    )
    return result


def _options(tile: ColumnTile, most: int) -> dict[str, int]:
    return {"COLUMNS": min(tile.columns, most), "num_warps": tile.warps, "num_stages": tile.stages}
