"""Draws from logits that ranks divide: each finds the best of its ids, and the best of all is what one rank draws.

A rank holds the logits of ids [first, first + part). What the ranks tell each other of a row is one key
(`strata.kernels.sampling.score_keys`), so a draw is the best key of each part, one all-gather, and the largest key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.sampling.filters_triton import score_order
from strata.kernels.sampling.sampling import (
    NO_ID,
    best_of_blocks,
    gumbel_blocks_kernel,
    gumbel_noise,
    scaled,
)
from strata.kernels.sampling.score_keys import NO_KEY, key_ids, key_scores, score_keys
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _best_cost(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, first: int, *, workload: Workload
) -> Cost:
    # As of `gumbel_sample`: twelve integer operations, a division and two logarithms make the score of one id.
    read = logits.nbytes + temperatures.nbytes + seeds.nbytes + steps.nbytes
    return Cost(flops=16 * logits.numel(), read=read, written=8 * logits.shape[0])


def _best_meta(logits: Tensor, *_: Tensor | int) -> Tensor:
    return logits.new_empty((logits.shape[0], 1), dtype=torch.int64, device="meta")


@operation(_best_cost, meta=_best_meta)
def best_in_part(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, first: int) -> Tensor:
    """The best sum of logit and noise among a rank's ids, and its id, as keys [rows, 1] int64: see `score_keys`.

    logits [rows, part] of ids [first, first + part), of any float dtype; temperatures, seeds and steps [rows] as
    `gumbel_sample` takes them, whose noise it is. `NO_KEY` where the part has no ids.
    """
    if not logits.shape[1]:
        return torch.full((len(logits), 1), NO_KEY, device=logits.device)
    noise = gumbel_noise(seeds, steps, logits.shape[1], first)
    scores, ids = (scaled(logits, temperatures) + noise.masked_fill((temperatures == 0)[:, None], 0)).max(-1, True)
    return score_keys(scores, ids + first)


@best_in_part.implement("torch", "cpu", invariant=True)
def _best_cpu(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, first: int) -> Tensor:
    if logits.shape[1] and not bool(temperatures.any()):
        scores, ids = logits.max(-1, True)
        return score_keys(scores, ids + first)
    return best_in_part.reference(logits, temperatures, seeds, steps, first)  # type: ignore[no-any-return]


def _choice_cost(keys: Tensor, *, workload: Workload) -> Cost:
    return Cost(flops=keys.numel(), read=keys.nbytes, written=4 * keys.shape[0])


def _choice_meta(keys: Tensor) -> Tensor:
    return keys.new_empty(keys.shape[0], dtype=torch.int32, device="meta")


@operation(_choice_cost, meta=_choice_meta)
def best_of_parts(keys: Tensor) -> Tensor:
    """The id of the best key of each row: keys [rows, parts] int64 -> ids [rows] int32, the lowest among equals.

    `NO_ID` where the best score is not finite, so the row is no distribution, whichever part knows it.
    """
    best = keys.amax(-1)
    return torch.where(key_scores(best).isfinite(), key_ids(best), NO_ID)


best_of_parts.by_definition("cpu", invariant=True)


@jit
def gumbel_part_kernel(best, best_id, keys, blocks, BLOCKS: tl.constexpr):
    """The key of the best of the blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    values = tl.load(best + row * blocks + block, mask=block < blocks, other=-float("inf"))
    value, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    id = tl.load(best_id + row * blocks + index).to(tl.int64)
    tl.store(keys + row, (score_order(value + 0.0) << 32) + (0xFFFFFFFF - id))


@jit
def best_of_parts_kernel(keys, result, rows, parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The ids of ROWS rows, -1 (NO_ID) where the best score is not finite."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    held = (row < rows)[:, None] & (part < parts)[None, :]
    found = tl.load(keys + row[:, None] * parts + part[None, :], mask=held, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.max(found, 1)
    order = best >> 32
    id = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    finite = (order > LEAST) & (order < MOST)
    tl.store(result + row, tl.where(finite, id, -1).to(tl.int32), mask=row < rows)


# Of -inf and inf, as `score_order` says.
LEAST = tl.constexpr((0xFF800000 ^ 0x7FFFFFFF) - 2**32) if HAS_TRITON else None
MOST = tl.constexpr(0x7F800000) if HAS_TRITON else None
_CHOICE_ROWS = 32


def _best_triton(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor, first: int) -> Tensor:
    rows, part = logits.shape
    if not part:
        return torch.full((rows, 1), NO_KEY, device=logits.device)
    keys = torch.empty((rows, 1), dtype=torch.int64, device=logits.device)
    if rows:
        best, best_id = best_of_blocks(logits, temperatures, seeds, steps, None, first)
        blocks = best.shape[1]
        gumbel_part_kernel[(rows,)](best, best_id, keys, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1)
    return keys


def _choice_triton(keys: Tensor) -> Tensor:
    rows, parts = keys.shape
    keys = keys.contiguous()
    result = torch.empty(rows, dtype=torch.int32, device=keys.device)
    if rows:
        best_of_parts_kernel[(ceil_div(rows, _CHOICE_ROWS),)](
            keys, result, rows, parts, ROWS=_CHOICE_ROWS, PARTS=next_power_of_2(parts), num_warps=1
        )
    return result


best_in_part.in_triton(_best_triton, invariant=True, kernels=(gumbel_blocks_kernel, gumbel_part_kernel))
best_of_parts.in_triton(_choice_triton, invariant=True, kernels=(best_of_parts_kernel,))
