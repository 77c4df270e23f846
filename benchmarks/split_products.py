"""Products in 8 bits of up to 256 rows, on one GPU: every tile that could serve, beside the one that is chosen.

    python -m benchmarks.split_products --rows 136,160,192,224,256,96,128,24,32,64 --save split.jsonl

The weights are those of a layer of 8B, as they are merged. Calls are recorded in a CUDA graph and find none of their
weights in the cache. Lines of JSON: of each product and way the microseconds and the relative error (of norms, against
the same rounded rows in float32), then of each number of rows a line for the layer: its four products one after the
other in one graph, by the tiles that `split_tile` chooses and by the fastest. A table of these ends the output: what
`split_tile` should choose. Ways: "tile"; "library by rows", with scales of rows; "library by one", with one scale,
which no scheme asks for; up to 64 rows also "floats", the rows as they are by a weight that becomes floats, and
"rounded first", by the chosen tile behind a kernel that rounds the rows. Where these two cross is `quantized_rows`;
steps that round rows where they are made take "chosen" and little more.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from benchmarks.quantized_products import MODELS, weights
from strata.hardware.replay import time_replayed
from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.quantized.many_rows import quantized_call
from strata.kernels.linear.quantized.small_m import chosen_tile
from strata.kernels.linear.quantized.split_product import SplitTile, split_product, split_tile
from strata.kernels.linear.quantized_linear import QuantizedCall, by_library, by_split_k
from strata.kernels.linear.small_m import SmallMProduct, multiply
from strata.kernels.quant.fp8 import library_product
from strata.kernels.quant.quantized import QuantizedWeight, dense
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES

SHAPES = MODELS["8B"]
MAX_FLOATS = 64
# Rows and columns of tiles: what the registers of eight warps hold sums of.
SIZES = (
    *product((64,), (64, 96, 128, 224, 256)),
    *product((128,), (64, 96, 128, 224, 256)),
    *product((192,), (64, 128, 256)),
    *product((256,), (64, 96, 128)),
)
# Barriers of a pipeline and other small things in shared memory.
_BARRIERS, _MAX_STAGES = 1024, 6
# Sums of e4m3 by tensor cores have 14 bits; what is farther off is wrong, and never the fastest.
_MAX_ERROR = 2e-2
# Fewer programs leave too many processors idle.
_MIN_BUSY = 0.6


def candidates(rows: int, out: int, width: int, processors: int) -> list[SplitTile]:
    """Tiles for so many rows by a weight [out, width] that keep most processors busy, and the chosen one first."""
    chosen = split_tile(rows, out, width, processors)
    found = [] if chosen is None else [chosen]
    lowest = next(height for height, _ in SIZES if height >= rows)
    heights = (lowest, 128) if rows > 128 else (lowest,)
    for (held, columns), splits in product(SIZES, (1, 2, 4)):
        programs = ceil_div(rows, held) * ceil_div(out, columns) * splits
        few, many = programs < _MIN_BUSY * processors, programs > (2 if splits == 1 else 1.1) * processors
        # Parts of wide tiles have more sums to add up than operands to load.
        if held not in heights or few or many or (splits > 2 and columns > 128):
            continue
        for warps in _warps(held * columns):
            tile = SplitTile(held, columns, splits, warps, _stages(held + columns, programs > processors))
            if tile.fits(width) and tile not in found:
                found.append(tile)
    return found


def _warps(sums: int) -> tuple[int, ...]:
    """Four or eight, between 64 and 128 sums of each of four warps' threads both."""
    if sums <= 64 * 128:
        return (4,)
    return (4, 8) if sums < 128 * 128 else (8,)


def _stages(lines: int, two: bool) -> int:
    """As many as fit, of so many rows of operands each; of two programs on a processor, if these have three."""
    whole, half = ((memory - _BARRIERS) // (128 * lines) for memory in (SHARED_BYTES, SHARED_BYTES // 2))
    return min(_MAX_STAGES, half if two and half >= 3 else whole)


class Product:
    """Rows times one of a layer's weights, of which there are enough copies to find none in the cache."""

    def __init__(self, packed: Sequence[QuantizedWeight], rows: int) -> None:
        self.packed, (out, width) = packed, packed[0].shape
        self.x = torch.randn(rows, width, device=packed[0].device, dtype=torch.bfloat16)
        self.values, self.scales = round_rows.bind("cuda")(self.x, packed[0].kind, 0)
        self.wanted = self.values.float() * self.scales @ dense(packed[0]).t()
        self.tiles = candidates(rows, out, width, DeviceLimits.of(self.x.device).processors)
        self.guess = packed[0].nbytes / 3e12 + 2 * rows * out * width / 1e15

    def by_tile(self, tile: SplitTile, weight: QuantizedWeight) -> Tensor:
        return split_product(self.values, self.scales, weight, None, self.x.dtype, tile)

    def others(self) -> Iterator[tuple[str, Callable[[QuantizedWeight], Tensor]]]:
        """Ways that are not tiles of the split product."""
        if self.packed[0].kind == "e4m3":
            one = torch.ones((1, 1), device=self.x.device)  # of which the error means nothing
            yield (
                "library by rows",
                lambda weight: by_library(QuantizedCall(self.values, self.scales, weight, None, self.x.dtype)),
            )
            yield (
                "library by one",
                lambda weight: library_product(self.values, one, weight.values, one, self.x.dtype, True),
            )
        if len(self.x) <= MAX_FLOATS:
            tile = chosen_tile(self.x, self.packed[0])
            if tile is not None:
                yield "floats", lambda weight: multiply(SmallMProduct(self.x, weight), tile)[0]
            yield "rounded first", lambda weight: by_split_k(quantized_call(self.x, weight))

    def measure(self) -> Iterator[dict[str, Any]]:
        for tile in self.tiles:
            yield self._timed(partial(self.by_tile, tile)) | {
                "way": "tile",
                "tile": asdict(tile),
                "chosen": tile is self.tiles[0],
            }
        for way, run in self.others():
            yield self._timed(run) | {"way": way}

    def _timed(self, run: Callable[[QuantizedWeight], Tensor]) -> dict[str, Any]:
        error = (run(self.packed[0]).float() - self.wanted).norm() / self.wanted.norm()
        took = time_replayed([partial(run, weight) for weight in self.packed], repeats=5, estimate=self.guess)
        return {"us": round(1e6 * took.seconds, 2), "error": round(error.item(), 5)}


def layer(products: Mapping[str, Product], by: Mapping[str, SplitTile]) -> float:
    """Microseconds of its products by these tiles one after the other; as many layers as leave no weight in a cache."""

    def run(number: int) -> Tensor:
        for name, one in products.items():
            result = one.by_tile(by[name], one.packed[number])
        return result

    count = min(len(one.packed) for one in products.values())
    return 1e6 * time_replayed([partial(run, number) for number in range(count)], repeats=5, estimate=1e-4).seconds


def measure(held: Mapping[str, Sequence[QuantizedWeight]], rows: int) -> Iterator[dict[str, Any]]:
    products = {name: Product(packed, rows) for name, packed in held.items()}
    chosen, best, sums = {}, {}, defaultdict[str, float](float)
    for name, one in products.items():
        found = []
        for line in one.measure():
            yield {"product": name, "rows": rows} | line
            if line["way"] == "tile":
                found.append(line["us"] if line["error"] <= _MAX_ERROR else math.inf)
            else:
                sums[line["way"]] += line["us"]
        chosen[name], best[name] = one.tiles[0], one.tiles[found.index(min(found))]
        sums["chosen"] += found[0]
        sums["fastest"] += min(found)
    yield {
        "layer": rows,
        "sums": {way: round(took, 2) for way, took in sums.items()},
        "us": round(layer(products, chosen), 2),
        "fastest_us": round(layer(products, best), 2),
        "chosen": {name: written(tile) for name, tile in chosen.items()},
        "fastest": {name: written(tile) for name, tile in best.items()},
    }


def written(tile: SplitTile) -> str:
    """As the rule has it."""
    return f"SplitTile({tile.rows}, {tile.columns}, {tile.splits}, {tile.warps}, {tile.stages})"


def table(layers: Sequence[Mapping[str, Any]]) -> str:
    """What is chosen and what is fastest of each number of rows, a layer in microseconds."""
    lines = []
    for one in sorted(layers, key=lambda one: one["layer"]):
        ways = ", ".join(f"{way} {took}" for way, took in one["sums"].items())
        lines.append(f"{one['layer']} rows: {one['us']} us a layer, {one['fastest_us']} by the fastest tiles ({ways})")
        for name, tile in one["fastest"].items():
            lines.append(
                f"    {name}: {tile}" + ("" if tile == one["chosen"][name] else f", not {one['chosen'][name]}")
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", choices=("fp8", "int8"), default="fp8")
    parser.add_argument("--rows", default="136,160,192,224,256,96,128,24,32,64")
    parser.add_argument("--seconds", type=float, default=130, help="after which no number of rows is begun [130]")
    asked = gpu_arguments(parser)
    several = [int(rows) for rows in asked.rows.split(",")]
    most = thresholds_of(MEASURED).split_rows
    if not all(0 < rows <= most for rows in several):
        parser.error(f"--rows {asked.rows}: split products have 1 to {most} rows")
    lines = GpuLines("benchmarks.split_products", asked.save, scheme=asked.scheme)
    end = time.monotonic() + asked.seconds
    held = {name: weights(*shape, SCHEMES[asked.scheme]) for name, shape in SHAPES.items()}
    layers = []
    for rows in several:
        if time.monotonic() > end:
            print(f"no time left for {rows} rows", file=sys.stderr)
            continue
        for found in measure(held, rows):
            if "layer" in found:
                layers.append(found)
            lines.put(found)
    print(table(layers))


if __name__ == "__main__":
    main()
