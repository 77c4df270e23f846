"""The dense layer for few rows (decoding): the weight streams through once, at the speed of memory.

Two kernels. `gemv_kernel`, for one to four rows, multiplies on the CUDA cores: programs are many and each asks for its
whole tile of the weight at once. `skinny_kernel` multiplies on the tensor cores with the weight as the left operand, so
that few rows waste little, and may split k; the parts are then added in order. Which tile serves which shape was
measured (`strata bench kernels --tune`, see `tuned.py`); where no measurement stands, the library multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from strata.kernels import tuned
from strata.kernels.compile_case import CompileCase
from strata.kernels.triton_import import HAS_TRITON, gdc_launch_dependents, gdc_wait, jit, tl, triton

MOST_ROWS = 64
_GEMV_ROWS = 4
IMPLEMENTATION = "skinny"


@dataclass(frozen=True)
class SkinnyTile:
    """How a weight is divided among programs.

    kernel: "gemv" or "dot". columns, width: rows of the weight (columns of the result) and elements of each that a
    program holds at a time. splits: parts of k, each with programs of its own ("dot" only); set by the shape of the
    weight, not by the number of rows. stages: of the pipeline ("dot" only).
    early: launched before the kernel ahead of it has ended (programmatic dependent launch). "gemv" then loads its
    first weights while it waits, so that kernel must not be one that writes them.
    """

    kernel: str
    columns: int
    width: int
    warps: int
    stages: int = 1
    splits: int = 1
    early: bool = False

    def __post_init__(self) -> None:
        sizes = (self.columns, self.width, self.warps, self.stages, self.splits)
        if any(type(size) is not int or size < 1 for size in sizes) or type(self.early) is not bool:
            raise ValueError(f"a tile has positive whole numbers and true or false for early, not {asdict(self)}")
        if self.kernel not in ("gemv", "dot") or any(size & (size - 1) for size in sizes[:3]):
            raise ValueError(f"a tile is for gemv or dot, and its sizes are powers of two: {asdict(self)}")
        if self.kernel == "gemv" and (self.splits, self.stages) != (1, 1):
            raise ValueError(f"gemv has one split and one stage, not {asdict(self)}")

    def fits(self, rows: int, width: int) -> bool:
        """Whether it can multiply so many rows by a weight [any, width]."""
        if self.kernel == "dot":
            return rows <= MOST_ROWS and width % (self.splits * self.width) == 0
        return rows <= _GEMV_ROWS and (width <= self.width or width % self.width == 0)


@jit
def _add_products(total, values, x, k, held, rows, x_stride, ROWS: tl.constexpr):
    """total [columns, ROWS] plus the sums of values [columns, k] times each row of x at k."""
    wide = values.to(tl.float32)
    row = tl.arange(0, ROWS)[None, :]
    for index in tl.static_range(ROWS):
        left = tl.load(x + tl.minimum(index, rows - 1) * x_stride + k, mask=held, other=0.0).to(tl.float32)
        total = tl.where(row == index, total + tl.sum(wide * left[None, :], 1)[:, None], total)
    return total


@partial(jit, unspecialized=("rows",))
def gemv_kernel(
    x,
    weight,
    bias,
    result,
    rows,
    out,
    width,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    ONCE: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    held = k < width
    # Clamped instead of masked: what lies beyond the edge is computed from the last column and never stored.
    tile = weight + tl.minimum(column, out - 1).to(tl.int64)[:, None] * weight_stride + k[None, :]
    if ONCE:
        values = tl.load(tile, mask=held[None, :], other=0.0, eviction_policy="evict_first")
    else:
        values = tl.load(tile, eviction_policy="evict_first")
    if EARLY:
        # No dependent starts before this wait is over, so what precedes a kernel's own wait may read all that was
        # written before the kernel ahead of it began.
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    last = 0
    if not ONCE:
        for start in range(BLOCK_K, width, BLOCK_K):
            # Asked for before the products of the tile before it are made.
            following = tl.load(tile + start, eviction_policy="evict_first")
            total = _add_products(total, values, x + last, k, held, rows, x_stride, ROWS)
            values = following
            last = start
    total = _add_products(total, values, x + last, k, held, rows, x_stride, ROWS)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < out, other=0.0).to(tl.float32)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    target = result + row * out + column[:, None]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < rows) & (column[:, None] < out))


@partial(jit, unspecialized=("rows",))
def skinny_kernel(
    x,
    weight,
    bias,
    result,
    rows,
    out,
    part,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sum over one part of k. result: [parts, rows, out], float32 if there are several parts."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    k = split * part + tl.arange(0, BLOCK_K)
    weight_tile = weight + tl.minimum(column, out - 1).to(tl.int64)[:, None] * weight_stride + k[None, :]
    x_tile = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * x_stride + k[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        total = tl.dot(tl.load(weight_tile, eviction_policy="evict_first"), tl.load(x_tile), total)
        weight_tile += BLOCK_K
        x_tile += BLOCK_K
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < out, other=0.0).to(tl.float32)[:, None]
    target = result + (split * rows + row[None, :]) * out + column[:, None]
    tl.store(target, total.to(result.dtype.element_ty), mask=(row[None, :] < rows) & (column[:, None] < out))


@partial(jit, unspecialized=("count",))
def add_parts_kernel(
    parts,
    bias,
    result,
    count,
    out,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """parts [SPLITS, count] float32, added in order -> result [count]; count is rows times out."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = element < count
    total = tl.load(parts + element, mask=held, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + tl.cast(split, tl.int64) * count + element, mask=held, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + element % out, mask=held, other=0.0).to(tl.float32)
    tl.store(result + element, total.to(result.dtype.element_ty), mask=held)


_ADD_BLOCK, _ADD_WARPS = 512, 4


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)


def launches(rows: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor, tile: SkinnyTile) -> tuple[Launch, ...]:
    """What `skinny_linear` launches, in order: rows [rows, width], result [rows, out] contiguous."""
    (count, width), out = rows.shape, weight.shape[0]
    flags: dict[str, Any] = {"HAS_BIAS": bias is not None, "EARLY": tile.early, "launch_pdl": tile.early}
    some_bias = weight if bias is None else bias
    tiles = triton.cdiv(out, tile.columns)
    block: dict[str, Any] = {"BLOCK_N": tile.columns, "BLOCK_K": tile.width, "num_warps": tile.warps}
    if tile.kernel == "gemv":
        block |= {"ONCE": width <= tile.width, "ROWS": triton.next_power_of_2(count)}
    else:
        # The least that leaves one kind of instruction to a tile: wgmma to those of 64 columns and more.
        least = 16 if tile.columns >= 64 else 8
        block |= {"BLOCK_M": max(least, triton.next_power_of_2(count)), "STAGES": tile.stages}
    kernel = gemv_kernel if tile.kernel == "gemv" else skinny_kernel
    sizes = (count, out, width // tile.splits, rows.stride(0), weight.stride(0))
    if tile.splits == 1:
        return (Launch(kernel, (tiles, 1), (rows, weight, some_bias, result, *sizes), block | flags),)
    parts = torch.empty((tile.splits, count, out), dtype=torch.float32, device=rows.device)
    multiply = block | flags | {"HAS_BIAS": False}
    return (
        Launch(kernel, (tiles, tile.splits), (rows, weight, some_bias, parts, *sizes), multiply),
        Launch(
            add_parts_kernel,
            (triton.cdiv(count * out, _ADD_BLOCK),),
            (parts, some_bias, result, count * out, out),
            flags | {"SPLITS": tile.splits, "BLOCK": _ADD_BLOCK, "num_warps": _ADD_WARPS},
        ),
    )


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: SkinnyTile) -> Tensor:
    """`x @ weight^T + bias` for at most 64 rows, as `linear`: x [..., width], weight [out, width] -> [..., out].

    Sums are float32. With the same tile, the bits of a row do not depend on the other rows.
    Raises ValueError where `aligned` or `tile.fits` is false.
    """
    count, width = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    if not (aligned(x, weight) and tile.fits(count, width)):
        raise ValueError(f"{tile} does not fit x {list(x.shape)} and weight {list(weight.shape)}; use linear")
    result = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    if result.numel():
        for launch in launches(x.reshape(-1, width), weight, bias, result, tile):
            launch.run()
    return result


def aligned(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can take these: 16-bit floats whose rows can be loaded 16 bytes at a time."""
    return (
        x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % 16 == 0
        and weight.stride(1) == x.stride(-1) == 1
        and weight.stride(0) % 16 == 0
        and (x.dim() < 2 or x.stride(-2) % 16 == 0)
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def row_bucket(rows: int) -> int:
    """The number of rows under which a table lists a product: the next power of two."""
    return 1 << max(0, rows - 1).bit_length()


Tiles = Mapping[tuned.Key, SkinnyTile]


def tiles_of(table: tuned.Table) -> Tiles:
    """The tiles in a table. Raises ValueError if one is not a tile or does not fit its shape."""
    found = {}
    for key, choice in table.items():
        if key.operation != "linear" or choice.implementation != IMPLEMENTATION:
            continue
        try:
            tile = SkinnyTile(**choice.parameters)
        except TypeError:
            raise ValueError(f"the table's {key} has {dict(choice.parameters)}, which describe no tile") from None
        if not tile.fits(key.rows, key.width):
            raise ValueError(f"the table's {tile} does not fit {key}")
        found[key] = tile
    return MappingProxyType(found)


def choose_tile(rows: int, out: int, width: int, dtype: torch.dtype, tiles: Tiles) -> SkinnyTile | None:
    """The tile that was measured to be fastest, or None: the library was, or nothing was measured."""
    if not 0 < rows <= MOST_ROWS:
        return None
    return tiles.get(tuned.Key("linear", str(dtype).removeprefix("torch."), out, width, row_bucket(rows)))


@cache
def device_tiles(device: torch.device) -> Tiles:
    """The tiles in the package's table for that CUDA device; none without Triton or without a table."""
    return tiles_of(tuned.read(torch.cuda.get_device_name(device))) if HAS_TRITON else MappingProxyType({})


def tuned_tile(x: Tensor, weight: Tensor) -> SkinnyTile | None:
    """The tile for a product on the device of `x`, None for the library."""
    out, width = weight.shape
    rows = x.numel() // width
    if rows > MOST_ROWS:  # before anything that takes time: prefill comes this way too
        return None
    tile = choose_tile(rows, out, width, x.dtype, device_tiles(x.device))
    return tile if tile is not None and aligned(x, weight) else None


def candidates(rows: int, width: int) -> list[SkinnyTile]:
    """The tiles worth measuring for so many rows and a weight [any, width]."""
    gemv = [
        SkinnyTile("gemv", columns, block, warps)
        for columns, block, warps in (
            (2, 4096, 4),
            (4, 4096, 8),
            (4, 4096, 4),
            (2, 4096, 8),
            (4, 2048, 4),
            (2, 2048, 4),
            (8, 2048, 8),
            (4, 2048, 8),
            (8, 1024, 4),
            (4, 1024, 4),
            (4, 1024, 2),
            (16, 1024, 8),
        )
        if block <= triton.next_power_of_2(width)
    ]
    dot = [
        SkinnyTile("dot", columns, block, warps, stages, splits)
        for columns, block, warps, stages, splits in (
            (16, 256, 2, 4, 1),
            (16, 512, 4, 4, 1),
            (32, 256, 4, 4, 1),
            (32, 256, 4, 4, 2),
            (32, 128, 4, 6, 2),
            (64, 128, 4, 4, 1),
            (64, 256, 4, 3, 1),
            (64, 256, 4, 3, 2),
            (64, 256, 4, 3, 4),
            (64, 128, 4, 4, 2),
            (64, 128, 4, 4, 4),
            (64, 128, 4, 4, 8),
            (128, 128, 8, 3, 4),
            (128, 128, 8, 4, 1),
            (128, 128, 8, 4, 8),
        )
        if (block, stages, rows) != (512, 4, 64)  # 256 KB of shared memory
    ]
    return [tile for tile in (*gemv, *dot) if tile.fits(rows, width)]


def compile_cases() -> list[CompileCase]:
    cases = []
    common = dict.fromkeys(("x", "weight", "bias", "result"), "*bf16:16") | {"rows": "i32"}
    common |= dict.fromkeys(("out", "x_stride", "weight_stride"), "i32:16")
    flags = {"HAS_BIAS": False, "EARLY": True}
    for columns, block, warps, once, rows in ((4, 4096, 8, True, 1), (4, 2048, 4, False, 1), (4, 2048, 4, False, 4)):
        constants = flags | {"ONCE": once, "ROWS": rows, "BLOCK_N": columns, "BLOCK_K": block}
        name = f"gemv of {rows} {columns}x{block}"
        loads = ("ld.global.L1::evict_first", "v4.b32", "griddepcontrol.wait")
        cases.append(CompileCase(name, gemv_kernel, common | {"width": "i32:16"}, constants, warps, 2, loads))
    for columns, block, warps, stages, rows, product in (
        (16, 256, 2, 4, 8, "mma.sync"),
        (64, 128, 4, 4, 16, "wgmma.mma_async"),
        (64, 256, 4, 3, 64, "wgmma.mma_async"),
        (128, 128, 8, 4, 64, "wgmma.mma_async"),
    ):
        must = (product, "cp.async")
        constants = flags | {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": block, "STAGES": stages}
        name = f"skinny {rows}x{columns}x{block}"
        cases.append(CompileCase(name, skinny_kernel, common | {"part": "i32:16"}, constants, warps, stages, must))
    signature = {"parts": "*fp32:16", "bias": "*bf16:16", "result": "*bf16:16", "count": "i32", "out": "i32:16"}
    constants = flags | {"SPLITS": 4, "BLOCK": _ADD_BLOCK}
    cases.append(CompileCase("skinny parts", add_parts_kernel, signature, constants, _ADD_WARPS, 2))
    return cases
