"""The dense layer for few rows (small-M GEMM, decoding): the weight streams through once, at the speed of memory.

Two kernels (`small_m_kernels`): for one to four rows, and for up to 256. Both can apply the scale of a norm to the
rows, gate half of the columns by the other half, add a residual and prepare the next norm (`prenorm`); of plain weights
they can send the product to the ranks that add it up (`strata.kernels.collective.gemm_all_reduce`). Which tile serves
which shape was measured (`strata bench kernels --tune`, `small_m_tiles`).

What a packed weight's scheme says of activations is left out: few rows cost nothing as they are, so x is not rounded to
8 bits and the result is nearer to that of the plain weight than the reference's; one row by int4 is to 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.linear.quantized.int4_gemv import CHUNK, in_chunks
from strata.kernels.linear.quantized.small_m import group_of, in_order, ordered
from strata.kernels.linear.small_m_kernels import dot_kernel, gemv_kernel
from strata.kernels.linear.small_m_tiles import IMPLEMENTATION, QUANTIZED_IMPLEMENTATION, SmallMTile, aligned
from strata.kernels.linear.tile_rule import chosen_tile
from strata.kernels.op import ATEN, Operation
from strata.kernels.quant.quantized import TWO_OF_FOUR, QuantizedWeight
from strata.kernels.split_counters import split_counters

Weight = Tensor | QuantizedWeight

# A prefetch brings in pieces of so many bytes.
_PIECE = 256


@dataclass(frozen=True)
class Inboxes:
    """Where a product is sent instead of stored: to all ranks of an axis, in one shot.

    addresses: [ranks] int64, of their inboxes. calls: [rows or more] int32, how often each row was sent so far. rank:
    this one's number. starts_receiver: the kernel behind may start beside the product, on devices that can do that.
    """

    addresses: Tensor
    calls: Tensor
    rank: int
    starts_receiver: bool


@dataclass(frozen=True)
class SmallMProduct:
    """`x @ weight^T + bias`, and what else happens to it in the same kernel.

    x [rows, width], weight [out, width], also packed, bias [out] or None.
    squares [rows, blocks] float32, eps: if given, each row of the product is multiplied by
    1 / sqrt(sum(squares) / width + eps) before the bias is added.
    gated: the result is silu(first half of the columns) * second half.
    residual [rows, out], norm_weight [out]: if given, the residual is added, and the results are those of `linear_add`.
    inboxes: if given, the product by a plain weight, of an even number of columns, is rounded and sent there, and
    nothing else happens to it; there are no results.
    """

    x: Tensor
    weight: Weight
    bias: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    inboxes: Inboxes | None = None

    def __post_init__(self) -> None:
        others = (self.bias, self.squares, self.residual)
        is_more = self.gated or isinstance(self.weight, QuantizedWeight) or any(one is not None for one in others)
        if self.inboxes is not None and (is_more or self.out % 2):
            raise ValueError(f"a product that is sent is x [rows, width] by a weight [even, width] alone, not {self}")

    @property
    def out(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (1 + self.gated)


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and arguments, and the tensors among them that it writes its results to, if any."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    results: tuple[Tensor, ...]

    def run(self) -> tuple[Tensor, ...]:
        if not self.results or self.results[0].numel():
            self.kernel[self.grid](*self.args, **self.options)
        return self.results

    def compile(self) -> None:
        """Compile the kernel, into Triton's cache on disk too, without running it."""
        self.kernel.warmup(*self.args, grid=self.grid, **self.options)


def launch(product: SmallMProduct, tile: SmallMTile) -> Launch:
    """What multiplies with a tile that `fits`, x in the order of the weight. results: the product [rows, out]; or
    total, weighted and squares; or none where it is sent."""
    x, weight, squares, residual = product.x, product.weight, product.squares, product.residual
    (count, width), out, inboxes = x.shape, product.out, product.inboxes
    tiles, rows = ceil_div(weight.shape[0], tile.columns), tile.program_rows(count)
    results = [] if inboxes is not None else [torch.empty((count, out), dtype=x.dtype, device=x.device)]
    if residual is not None:
        results.append(torch.empty((count, out), dtype=x.dtype, device=x.device))
        results.append(torch.empty((count, tiles), dtype=torch.float32, device=x.device))
    of_weight: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
    if isinstance(weight, QuantizedWeight):
        of_weight = weight.values, weight.scales, weight.zeros, weight.row_scales
        kind, row_group, group = weight.kind, weight.rows, group_of(weight)
        if kind == TWO_OF_FOUR:
            # Four values are loaded together, those of eight columns.
            of_weight = weight.values.view(torch.int64), *of_weight[1:]
    else:
        of_weight = weight, None, None, None
        kind, row_group, group = "float", 1, 0
    values, scales, *_ = of_weight
    tensors = (product.bias, squares, residual, product.norm_weight, *results, *(None,) * (3 - len(results)))
    strides = (
        None if scales is None else scales.stride(0),
        None if residual is None else residual.stride(0),
        None if squares is None else squares.shape[1],
        None if squares is None else product.eps,
    )
    beside = (None, None, None) if inboxes is None else (inboxes.addresses, inboxes.calls, inboxes.rank)
    options: dict[str, Any] = {
        "ROW_GROUP": row_group,
        "GATED": product.gated,
        "EARLY": tile.early or (inboxes is not None and inboxes.starts_receiver),
        "BLOCKS": 1 if squares is None else next_power_of_2(squares.shape[1]),
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.width,
        "num_warps": tile.warps,
        "launch_pdl": tile.early,
    }
    operands = (x, *of_weight, *tensors)
    options |= {"KIND": kind, "GROUP": group, "WORLD": 1 if inboxes is None else len(inboxes.addresses)}
    sizes = (count, out, width // tile.splits, x.stride(0), values.stride(0), *strides, *beside)
    if tile.kernel == "gemv":
        if kind == "int4" and (count != 1 or width > tile.width or not in_chunks(width, group)):
            what = f"one row of int4 at once, of chunks of {CHUNK} columns and groups of whole chunks"
            raise ValueError(f"{tile} takes {what}, not {[count, width]} in groups of {group}")
        options |= {"ROWS": rows, "ONCE": width <= tile.width}
        return Launch(gemv_kernel, (tiles,), (*operands, *sizes), options, tuple(results))
    grid = (tiles, tile.splits, ceil_div(count, rows))
    parts = counters = None
    if tile.splits > 1:
        parts = torch.empty((math.prod(grid), tile.columns, rows), dtype=torch.float32, device=x.device)
        counters = split_counters(x.device)
    # Of four-bit floats a block may have several groups; of others it has a part of one.
    block = tile.width if not group or kind == "e2m1" else min(tile.width, group)
    ahead = min(tile.prefetch, width // tile.splits) * values.shape[1] // width * values.element_size()
    pieces = 1 << (ahead // _PIECE).bit_length() - 1 if ahead >= _PIECE and values.dtype != torch.int64 else 0
    options |= {"BLOCK_M": rows, "FULL": count % rows == 0, "STAGES": tile.stages, "SPLITS": tile.splits}
    options |= {"BLOCK_K": block, "STEPS": tile.width // block, "PIECES": pieces}
    return Launch(dot_kernel, grid, (*operands, parts, counters, *sizes), options, tuple(results))


def scratch_bytes(tile: SmallMTile, x: Tensor, weight: Weight) -> int:
    """Beside the results: rows in the order of the weight, and what the splits of the product wait in."""
    (columns, width), copy = weight.shape, 0 if in_order(weight) else x.nbytes
    if tile.kernel == "gemv" or tile.splits == 1:
        return copy
    count = x.numel() // width
    rows = tile.program_rows(count)
    return copy + 4 * ceil_div(columns, tile.columns) * tile.columns * tile.splits * ceil_div(count, rows) * rows


def multiply(product: SmallMProduct, tile: SmallMTile) -> tuple[Tensor, ...]:
    """The results of `launch`. Sums are float32; with the same tile, the bits of a row do not depend on other rows.

    Raises ValueError where `aligned` or `tile.fits` is false for a plain weight, which `chosen_tile` has seen to.
    """
    x, weight = product.x, product.weight
    if isinstance(weight, Tensor) and not (aligned(x, weight) and tile.fits(x.shape[0], *weight.shape)):
        raise ValueError(f"{tile} does not fit x {list(x.shape)} and weight {list(weight.shape)}; use linear")
    return launch(product if in_order(weight) else replace(product, x=ordered(x, weight)), tile).run()


def kernels_of(tile: SmallMTile, weight: Weight) -> tuple[Any, ...]:
    """What multiplies by a weight with a tile."""
    kernel = gemv_kernel if tile.kernel == "gemv" else dot_kernel
    return (kernel,) if in_order(weight) else (ATEN, kernel)


def _by_weight(x: Tensor, weight: Weight, bias: Tensor | None = None) -> tuple[Tensor, Weight]:
    return x, weight


def implement_small_m(
    operation: Operation,
    product: Callable[..., SmallMProduct],
    factors: Callable[..., tuple[Tensor, Weight]] = _by_weight,
    can_read: Callable[..., bool] = lambda *given: True,
) -> None:
    """Register these kernels for an operation where `chosen_tile` has a tile for its x [..., width] and weight.

    Of what implementations are called with, `product` makes the product of rows [rows, width], `factors` tells x and
    weight, and `can_read` whether all else is as the kernels need it.
    """

    def tile_of(*given: Any) -> SmallMTile:
        tile = chosen_tile(operation.name, *factors(*given))
        assert tile is not None
        return tile

    def supports(*given: Any) -> bool:
        return can_read(*given) and chosen_tile(operation.name, *factors(*given)) is not None

    def run(*given: Any) -> Tensor | tuple[Tensor, ...]:
        before = factors(*given)[0].shape[:-1]
        results = tuple(one.view(*before, -1) for one in multiply(product(*given), tile_of(*given)))
        return results if len(results) > 1 else results[0]

    def kernels(*given: Any) -> tuple[Any, ...]:
        return kernels_of(tile_of(*given), factors(*given)[1])

    def scratch(*given: Any) -> int:
        return scratch_bytes(tile_of(*given), *factors(*given))

    for name, packed in ((IMPLEMENTATION, False), (QUANTIZED_IMPLEMENTATION, True)):
        operation.implement(name, "cuda", supports=supports, kernels=kernels, packed=packed, scratch=scratch)(run)
