"""The dense layer for few rows (decoding): the weight streams through once, at the speed of memory.

Two kernels (`skinny_kernels`): for one to four rows, and for up to 256. Both can apply the scale of a norm to the
rows, gate half of the columns by the other half, add a residual and prepare the next norm (`prenorm`), or send the
product to the ranks that add it up (`strata.kernels.collective.sent_products`). Which tile serves which shape was
measured (`strata bench kernels --tune`, `skinny_tiles`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.linear.skinny_kernels import dot_kernel, gemv_kernel
from strata.kernels.linear.skinny_tiles import PREFETCHED, SkinnyTile, aligned
from strata.kernels.split_counters import split_counters


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
class SkinnyProduct:
    """`x @ weight^T + bias`, and what else happens to it in the same kernel.

    x [rows, width], weight [out, width], bias [out] or None.
    squares [rows, blocks] float32, eps: if given, each row of the product is multiplied by
    1 / sqrt(sum(squares) / width + eps) before the bias is added.
    gated: the result is silu(first half of the columns) * second half.
    residual [rows, out], norm_weight [out]: if given, the residual is added, and the results are those of `linear_add`.
    inboxes: if given, the product, of an even number of columns, is rounded and sent there, and nothing else happens to
    it; there are no results.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    inboxes: Inboxes | None = None

    def __post_init__(self) -> None:
        others = (self.bias, self.squares, self.residual)
        if self.inboxes is not None and (self.gated or self.out % 2 or any(one is not None for one in others)):
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


def launch(product: SkinnyProduct, tile: SkinnyTile) -> Launch:
    """What multiplies with a tile that `fits`. results: the product [rows, out]; or total, weighted and squares; or
    none where it is sent."""
    x, weight, squares, residual = product.x, product.weight, product.squares, product.residual
    (count, width), out = x.shape, product.out
    tiles = ceil_div(weight.shape[0], tile.columns)
    inboxes = product.inboxes
    results = [] if inboxes is not None else [torch.empty((count, out), dtype=x.dtype, device=x.device)]
    if residual is not None:
        results.append(torch.empty((count, out), dtype=x.dtype, device=x.device))
        results.append(torch.empty((count, tiles), dtype=torch.float32, device=x.device))
    tensors = (x, weight, product.bias, squares, residual, product.norm_weight)
    outputs = (*results, *(None,) * (3 - len(results)))
    sizes = (
        count,
        out,
        width // tile.splits,
        x.stride(0),
        weight.stride(0),
        None if residual is None else residual.stride(0),
        None if squares is None else squares.shape[1],
        None if squares is None else product.eps,
        *((None,) * 3 if inboxes is None else (inboxes.addresses, inboxes.calls, inboxes.rank)),
    )
    options: dict[str, Any] = {
        "GATED": product.gated,
        "EARLY": tile.early or (inboxes is not None and inboxes.starts_receiver),
        "WORLD": 1 if inboxes is None else len(inboxes.addresses),
        "BLOCKS": 1 if squares is None else next_power_of_2(squares.shape[1]),
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.width,
        "num_warps": tile.warps,
        "launch_pdl": tile.early,
    }
    if tile.kernel == "gemv":
        options |= {"ROWS": tile.program_rows(count), "ONCE": width <= tile.width}
        return Launch(gemv_kernel, (tiles,), (*tensors, *outputs, *sizes), options, tuple(results))
    rows = tile.program_rows(count)
    grid = (tiles, tile.splits, ceil_div(count, rows))
    parts = counters = None
    if tile.splits > 1:
        parts = torch.empty((math.prod(grid), tile.columns, rows), dtype=torch.float32, device=x.device)
        counters = split_counters(x.device)
    prefetch = min(tile.prefetch, 1 << (width // tile.splits).bit_length() - 1)
    options |= {"BLOCK_M": rows, "FULL": count % rows == 0, "STAGES": tile.stages, "SPLITS": tile.splits}
    options["PIECES"] = prefetch // PREFETCHED
    return Launch(dot_kernel, grid, (*tensors, *outputs, parts, counters, *sizes), options, tuple(results))


def scratch_bytes(tile: SkinnyTile | None, count: int, columns: int) -> int:
    """What the splits of a product of so many rows by a weight of so many wait in."""
    assert tile is not None
    if tile.kernel == "gemv" or tile.splits == 1:
        return 0
    rows = tile.program_rows(count)
    return 4 * ceil_div(columns, tile.columns) * tile.columns * tile.splits * ceil_div(count, rows) * rows


def multiply(product: SkinnyProduct, tile: SkinnyTile) -> tuple[Tensor, ...]:
    """The results of `launch`. Sums are float32; with the same tile, the bits of a row do not depend on other rows.

    Raises ValueError where `aligned` or `tile.fits` is false.
    """
    x, weight = product.x, product.weight
    if not (aligned(x, weight) and tile.fits(x.shape[0], *weight.shape)):
        raise ValueError(f"{tile} does not fit x {list(x.shape)} and weight {list(weight.shape)}; use linear")
    return launch(product, tile).run()


def kernels_of(tile: SkinnyTile | None) -> tuple[Any, ...]:
    """What multiplies with the tile that was found."""
    assert tile is not None
    return (gemv_kernel if tile.kernel == "gemv" else dot_kernel,)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: SkinnyTile) -> Tensor:
    """`linear` with a tile: x [..., width], weight [out, width], bias [out] or None -> [..., out]."""
    (result,) = multiply(SkinnyProduct(x.reshape(-1, x.shape[-1]), weight, bias), tile)
    return result.view(*x.shape[:-1], weight.shape[0])
