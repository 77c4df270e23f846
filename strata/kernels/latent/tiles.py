"""How the kernels of latent attention divide their work. Decodes of up to 16 heads were measured on an H200
(`python -m benchmarks.latent.decodes --tiles`), all else was chosen by what registers and shared memory of a Hopper
hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.latent.forms import Dims

_PROCESSORS = 132
# A program needs much of a multiprocessor's memory, so more than two for each find no place.
_PROGRAMS = 2 * _PROCESSORS
_MOST_SPLITS = 64
# Even where there are many sequences, one may be much longer than the others.
_LEAST_SPLITS = 4
_SPLIT_ROWS = 256


@dataclass(frozen=True)
class LatentTile:
    """heads: of a program; queries: rows of its tile, heads times tokens. rows: of a block of latents; warps, stages:
    of a program and of its pipeline. split: the fewest rows that are worth a program. splits: the most of a sequence.
    """

    heads: int
    queries: int
    rows: int
    warps: int
    stages: int
    split: int = 0
    splits: int = 1

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def prompt_tile(heads: int, rank: int, dtype: torch.dtype) -> LatentTile:
    """The same for any batch: the bits of a result depend on it."""
    if dtype == torch.float32:
        return LatentTile(min(16, next_power_of_2(heads)), 16, 16, 8, 1)
    return LatentTile(min(64, next_power_of_2(heads)), 64, 32, 8, 2)


def decode_tile(heads: int, rank: int, dtype: torch.dtype, sequences: int, most: int) -> LatentTile:
    """For so many sequences of at most `most` rows. A matrix instruction has 16 rows at least."""
    together = max(16, min(64, next_power_of_2(heads)))
    if dtype == torch.float32:
        together = 16
    programs = max(1, sequences) * ceil_div(heads, together)
    wanted = max(_LEAST_SPLITS, _PROGRAMS // programs)
    splits = max(1, min(_MOST_SPLITS, wanted, ceil_div(most, _SPLIT_ROWS)))
    if dtype == torch.float32:
        return LatentTile(together, together, 16, 8, 1, _SPLIT_ROWS, splits)
    if together > 16:
        return LatentTile(together, together, 32, 8, 2, _SPLIT_ROWS, splits)
    # With three stages a program has a multiprocessor for itself, with two it has another beside it.
    return LatentTile(together, together, 64, 4, 3 if programs * splits <= _PROCESSORS else 2, _SPLIT_ROWS, splits)


def constants(dims: Dims, page_size: int, tile: LatentTile) -> dict[str, int]:
    """What the kernels of prompts and of decodes have in common."""
    return {
        "HEADS": dims.heads,
        "RANK": dims.rank,
        "RANK_PAD": max(16, next_power_of_2(dims.rank)),
        "ROPE": dims.rope,
        "ROPE_PAD": max(16, next_power_of_2(dims.rope)),
        "PAGE_SIZE": page_size,
        "BLOCK_HEADS": tile.heads,
        "BLOCK_N": tile.rows,
    }
