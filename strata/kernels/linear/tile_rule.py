"""Which tile serves a call: the one that the device's table lists for it, or else what a cost model expects to be best.

The model chooses among tiles worth measuring. The seconds of a product are what it takes to start, and beside that
whatever is slowest: the memory, which streams the weight; the busiest processor's way to the L2 cache, by which each of
its programs gets a part of the weight and of x; its instructions; or the turns of one program's loop over k, where
there are few programs. The first three overlap, but not all of the time, which adding their squares describes. Dividing
k among programs costs a second phase.

The constants are fitted to what an H200 took: the winners of its table, the tiles that they beat, and 700 timings of
tiles at 11 weights of other models (docs/log.md). Rates are those of one processor, so another GPU differs by how many
it has and by the bandwidth of its memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from strata.hardware.specs import recognize
from strata.kernels import tuned
from strata.kernels.choose import thresholds
from strata.kernels.device_limits import MIN_CAPABILITY, DeviceLimits
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.quantized import small_m
from strata.kernels.linear.small_m_tiles import MAX_ROWS, SmallMTile, Tiles, aligned, candidates, device_tiles
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.triton_import import HAS_TRITON
from strata.kernels.tuned import row_bucket

# From the launch to the first bytes, and from the last sum to the end of the kernel.
_START_SECONDS = 1.17e-6
# What a processor draws from the L2 cache: 58 bytes a cycle, of the 64 that it can.
_CACHE_BYTES_PER_SECOND = 101e9
# Of the time that the memory takes for the weight, what each further row of programs adds by reading it again.
_READ_AGAIN = 0.26
# Multiplications and additions a second of a processor: "gemv" converts each weight and needs several instructions for
# one, "dot" is near what the tensor cores do.
_GEMV_PER_SECOND, _DOT_PER_SECOND = 43e9, 5.1e12
# A further program of "dot" on a processor, which starts and ends by itself.
_PROGRAM_SECONDS = 0.47e-6
# A turn of the loop of "dot" in a tile of 16 columns, which two warps share, for each 8 rows; in one of 32; in wider
# ones, which use other instructions (wgmma), for 128 elements of k and each stage that is loaded ahead.
_TURN_OF_16_SECONDS, _MORE_ROWS_SECONDS = 0.2e-6, 0.21e-6
_TURN_OF_32_SECONDS = 0.58e-6
_WIDE_TURN_SECONDS = 0.73e-6
# With splits: all sums are stored, counted and read again, by one program a tile.
_SPLIT_SECONDS = 1.12e-6
_SUM_BYTES_PER_SECOND = 30e9
# A residual and the norm's weights and squares, in each 64 rows of a program.
_ADD_SECONDS = 0.13e-6

# What the library does too, `linear_silu_mul` in two launches. It has nothing that does the work of the others.
LIBRARY_TOO = ("linear", "linear_silu_mul")
# Of a GPU that is not in the database, the bandwidth for each of its processors is taken to be that of an H200.
_BANDWIDTH_PER_PROCESSOR = 4.8e12 / 132
# An early start saves a microsecond at most. Where weights stream longer than this it is not worth the room that it
# takes from the kernel ahead: 8B steps of 8 sequences took 4.87 ms with it for the gated product, 4.44 without.
_LONG_SECONDS = 30e-6
# Weights and rows for which there is room and time to bring whole parts of k into the L2 cache ahead.
_SMALL_BYTES, _PREFETCHED_ROWS = 16 << 20, 32


# Shapes of calls whose tile stays known.
_MAX_SHAPES = 8192


def chosen_tile(operation: str, x: Tensor, weight: Tensor | QuantizedWeight) -> SmallMTile | None:
    """The tile for x [..., width] and weight [out, width]; None where something else is faster or no tile fits."""
    out, width = weight.shape
    rows = x.numel() // width
    if not 0 < rows <= MAX_ROWS:  # before anything that takes time: prefill comes this way too
        return None
    if isinstance(weight, QuantizedWeight):
        # Only what the library has, too, is multiplied in 8 bits otherwise.
        return small_m.chosen_tile(x, weight, small_m.max_rows(x, weight) if operation in LIBRARY_TOO else MAX_ROWS)
    tile = _device_tile(operation, rows, out, width, x.dtype, DeviceLimits.of(x.device))
    return tile if tile is not None and aligned(x, weight) else None


@lru_cache(_MAX_SHAPES)
def _device_tile(
    operation: str, rows: int, out: int, width: int, dtype: torch.dtype, device: DeviceLimits
) -> SmallMTile | None:
    if not HAS_TRITON or device.capability < MIN_CAPABILITY:
        return None
    return choose_tile(operation, rows, out, width, dtype, device_tiles(device), device)


def choose_tile(
    operation: str, rows: int, out: int, width: int, dtype: torch.dtype, tiles: Tiles, device: DeviceLimits
) -> SmallMTile | None:
    """The tile of a table, or else the one that the rule expects to be fastest; None: the library is.

    Only the operations of `LIBRARY_TOO` are the library's where a table says so.
    """
    key = tuned.serving_key(tiles, tuned.Key(operation, str(dtype).removeprefix("torch."), out, width, rows))
    if key is not None and (operation in LIBRARY_TOO or tiles[key] is not None):
        return tiles[key]
    return expected_tile(operation, rows, out, width, device)


def expected_tile(operation: str, rows: int, out: int, width: int, device: DeviceLimits) -> SmallMTile | None:
    """The tile that should be fastest for a weight [out, width]; None if the library should be, or no tile fits."""
    most = thresholds(device).linear_rows if operation in LIBRARY_TOO else MAX_ROWS
    if not 0 < rows <= min(most, MAX_ROWS):
        return None
    return _expected_tile(operation, row_bucket(rows), out, width, device)


@lru_cache(4096)
def _expected_tile(operation: str, rows: int, out: int, width: int, device: DeviceLimits) -> SmallMTile | None:
    early = device.capability >= (9, 0)
    found = candidates(operation, rows, out, width, early)
    if not found:
        return None
    best = min(found, key=lambda tile: expected_seconds(operation, rows, out, width, tile, device))
    return started(best, rows, 2 * out * width, device) if early else best


def started(tile: SmallMTile, rows: int, nbytes: int, device: DeviceLimits) -> SmallMTile:
    """A tile that may be launched early, for a weight of so many bytes: where it pays, with what it prefetches."""
    if tile.kernel == "gemv":
        return tile
    if nbytes > _LONG_SECONDS * bandwidth(device):
        return replace(tile, early=False)
    whole = nbytes <= _SMALL_BYTES and rows <= _PREFETCHED_ROWS
    return replace(tile, prefetch=2048 if whole else 512 if tile.splits > 1 else 0)


def expected_seconds(operation: str, rows: int, out: int, width: int, tile: SmallMTile, device: DeviceLimits) -> float:
    """About what a product of 16-bit operands takes with a tile that `fits`."""
    held, part = tile.program_rows(rows), max(width // tile.splits, tile.width)
    rows_of_programs = ceil_div(rows, held)
    programs = ceil_div(out, tile.columns) * tile.splits * rows_of_programs
    busiest = ceil_div(programs, device.processors)
    is_dot = tile.kernel == "dot"
    overlapping = math.hypot(
        2 * out * width / bandwidth(device) * (1 + _READ_AGAIN * (rows_of_programs - 1)),
        busiest * 2 * (tile.columns + held * is_dot) * part / _CACHE_BYTES_PER_SECOND,
        busiest * tile.columns * held * part / (_DOT_PER_SECOND if is_dot else _GEMV_PER_SECOND),
    )
    seconds = _START_SECONDS + overlapping
    if is_dot:
        turns = part // tile.width * _turn_seconds(tile, held)
        seconds = _START_SECONDS + max(overlapping, turns) + busiest * _PROGRAM_SECONDS
    if tile.splits > 1:
        seconds += _SPLIT_SECONDS + 4 * tile.splits * tile.columns * held / _SUM_BYTES_PER_SECOND
    if operation == "linear_add":
        seconds += _ADD_SECONDS * (1 + held / 64)
    return seconds


def _turn_seconds(tile: SmallMTile, held: int) -> float:
    if tile.columns <= 16:
        return _TURN_OF_16_SECONDS + _MORE_ROWS_SECONDS * held / 8
    if tile.columns <= 32:
        return _TURN_OF_32_SECONDS
    return _WIDE_TURN_SECONDS * tile.width / 128 / max(1, tile.stages - 1)


@lru_cache
def bandwidth(device: DeviceLimits) -> float:
    """Bytes a second that the maker promises of a device's memory, or what its processors make likely."""
    known = recognize(device.product)
    if known is None:
        return _BANDWIDTH_PER_PROCESSOR * device.processors
    return known.ceiling("bandwidth", measured=False).value
