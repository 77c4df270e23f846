"""The gated delta rule over prompts on CUDA: what its three kernels wait in, their tiles and their launches.

Grids follow from shapes alone, so that a step can be recorded in a CUDA graph: a step of so many tokens and sequences
has `tokens // 64 + sequences` tiles at most, and a program finds the chunk that it is given, if any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.recurrent import gated_delta_triton
from strata.kernels.recurrent.delta_chunks_triton import (
    CHUNK,
    gated_delta_results_kernel,
    gated_delta_solve_kernel,
    gated_delta_states_kernel,
)
from strata.kernels.recurrent.gated_delta_triton import LENGTH_EPS
from strata.kernels.recurrent.sequences import STATE, RecurrentBatch

KERNELS = (gated_delta_solve_kernel, gated_delta_states_kernel, gated_delta_results_kernel)
# The longest sequence of a step has this many tokens at least.
_SHORTEST = 128


@dataclass(frozen=True)
class Tiles:
    """warps: of the programs of each kernel, in their order. state_columns, result_columns: of a head's values that a
    program of the second and of the third has. stages: loads in flight of the second."""

    warps: tuple[int, int, int] = (4, 4, 4)
    state_columns: int = 64
    result_columns: int = 128
    stages: int = 2


@dataclass(frozen=True)
class _Sizes:
    """Programs of the first kernel, and dimensions as they are padded."""

    programs: int
    key_dim: int
    value_dim: int

    @staticmethod
    def of(k: Tensor, v: Tensor, batch: RecurrentBatch) -> _Sizes:
        tiles = v.shape[0] // CHUNK + batch.offsets.shape[0] - 1
        dims = (max(16, next_power_of_2(dim)) for dim in (k.shape[2], v.shape[2]))
        return _Sizes(tiles * v.shape[1], *dims)

    def bytes_in(self, dtype: torch.dtype) -> int:
        each = CHUNK * (self.key_dim + self.value_dim) + self.key_dim * self.value_dim
        return self.programs * (each * dtype.itemsize + 3 * CHUNK * 4)


def supports(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> bool:
    """Long sequences in bfloat16, so many tokens that most tiles are full."""
    batch: RecurrentBatch = others[4]
    return (
        batch.longest >= _SHORTEST
        and v.shape[0] >= CHUNK * (batch.offsets.shape[0] - 1)
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and max(k.shape[2], v.shape[2]) <= 128
        and gated_delta_triton.supports(q, k, v, *others)
    )


def scratch(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> int:
    """What the kernels hand on: of each chunk its part of the triangular systems, its decays and the state before it."""
    return _Sizes.of(k, v, others[4]).bytes_in(v.dtype)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    batch: RecurrentBatch,
    layer: int,
    tiles: Tiles = Tiles(),
) -> Tensor:
    key_heads, key_dim = k.shape[1:]
    heads, value_dim = v.shape[1:]
    result = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not result.numel():
        return result
    states = batch.states
    kept, slots = v.new_empty(0, dtype=torch.float32), batch.offsets  # no row is touched where nothing is kept
    if states is not None:
        kept, slots = states.tensors[layer][STATE], states.slots
    sequences, sizes = batch.offsets.shape[0] - 1, _Sizes.of(k, v, batch)
    reads, puts = v.new_empty(sizes.programs, CHUNK, sizes.key_dim), v.new_empty(sizes.programs, sizes.value_dim, CHUNK)
    begins = v.new_empty(sizes.programs, sizes.value_dim, sizes.key_dim)
    decays, scales, lefts = v.new_empty(3, sizes.programs, CHUNK, dtype=torch.float32).unbind()
    shared = heads // key_heads
    padded: dict[str, Any] = {"KEY_DIM": sizes.key_dim, "VALUE_DIM": sizes.value_dim, "CHUNK": CHUNK}
    padded["PRECISION"] = "ieee" if v.dtype == torch.float32 else "tf32"
    gated_delta_solve_kernel[(sizes.programs,)](
        k,
        v,
        a,
        b,
        dt_bias,
        a_log,
        batch.offsets,
        reads,
        puts,
        decays,
        scales,
        lefts,
        sequences,
        heads,
        key_dim,
        value_dim,
        shared,
        k.stride(0),
        v.stride(0),
        a.stride(0),
        b.stride(0),
        LENGTH_EPS,
        HALVES=v.dtype == torch.bfloat16,
        **padded,
        num_warps=tiles.warps[0],
    )
    columns = min(tiles.state_columns, sizes.value_dim)
    gated_delta_states_kernel[(sequences, heads, ceil_div(value_dim, columns))](
        k,
        reads,
        puts,
        decays,
        lefts,
        begins,
        kept,
        slots,
        batch.offsets,
        batch.positions,
        heads,
        key_dim,
        value_dim,
        shared,
        k.stride(0),
        int(states is not None),
        COLUMNS=columns,
        **padded,
        num_warps=tiles.warps[1],
        num_stages=tiles.stages,
    )
    columns = min(tiles.result_columns, sizes.value_dim)
    gated_delta_results_kernel[(sizes.programs * (sizes.value_dim // columns),)](
        q,
        k,
        puts,
        decays,
        scales,
        begins,
        batch.offsets,
        result,
        sequences,
        heads,
        key_dim,
        value_dim,
        shared,
        q.stride(0),
        k.stride(0),
        LENGTH_EPS,
        key_dim**-0.5,
        COLUMNS=columns,
        **padded,
        num_warps=tiles.warps[2],
    )
    return result
