"""Products by packed weights on one GPU: microseconds beside the floor, and beside the plain product in bfloat16.

    python -m benchmarks.quantized_products --models 8B,0.6B --schemes fp8,int8,int4 --rows 1,64,8192
    python -m benchmarks.quantized_products --tiles --rows 1,4,16,64   # of few rows also every tile that could serve

The weights are those of a layer as they are merged. Calls are recorded in a CUDA graph and find none of their weights
in the cache. The floor is the larger of the bytes at the memory's measured rate and the FLOPs at that of the type in
which a call multiplies.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.hardware.replay import copies_beyond_l2, time_replayed
from strata.hardware.roofline import Workload, floor
from strata.hardware.specs import recognize
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.linear.linear import linear
from strata.kernels.linear.quantized.int4_gemv import in_chunks
from strata.kernels.linear.quantized.small_m import GEMV_WIDTH, chosen_tile, dot_shapes, dot_tiles
from strata.kernels.linear.small_m import SmallMProduct, multiply
from strata.kernels.linear.small_m_tiles import MAX_ROWS, QUANTIZED_IMPLEMENTATION, SmallMTile
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, pack
from strata.kernels.quant.schemes import SCHEMES

# Weights [out, width] of a layer.
MODELS = {
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
}
_IN_8_BITS = {"e4m3": "float8", "int8": "int8"}


def weights(out: int, width: int, scheme: Scheme) -> list[QuantizedWeight]:
    """Enough of them that taking turns leaves none in the cache; all of one random weight."""
    made = pack(torch.randn(out, width) * width**-0.5, scheme).to("cuda")
    again = copies_beyond_l2(made.nbytes) - 1
    copies = [made.with_tensors({name: field.clone() for name, field in made.tensors.items()}) for _ in range(again)]
    return [made, *copies]


def measure(model: str, name: str, scheme_name: str, rows: int, every_tile: bool) -> Iterator[dict[str, Any]]:
    out, width = MODELS[model][name]
    scheme = SCHEMES[scheme_name]
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    packed = weights(out, width, scheme)
    bound = linear.bind("cuda", packed=True)
    chosen = bound.choose(x, packed[0], None)
    eight = scheme.activations and chosen.name.startswith("rounded")
    cost = linear.cost(x, packed[0], None, workload=Workload((rows,), (rows,)))
    device = recognize(torch.cuda.get_device_name())
    least = None
    if device is not None:
        least = 1e6 * floor(cost, device, _IN_8_BITS[scheme.values] if eight else "bfloat16").seconds
    plain = [torch.randn(out, width, device="cuda", dtype=torch.bfloat16) for _ in range(len(packed) // 2 + 1)]
    guess = cost.bytes / 2e12 + cost.flops / 5e14
    took = 1e6 * time_replayed([partial(chosen.run, x, one, None) for one in packed], estimate=guess).seconds
    beside = linear.bind("cuda")
    bf16 = 1e6 * time_replayed([partial(beside, x, one, None) for one in plain], estimate=guess).seconds
    tile = chosen_tile(x, packed[0]) if chosen.name == QUANTIZED_IMPLEMENTATION else None
    line = {
        "model": model,
        "product": name,
        "scheme": scheme_name,
        "rows": rows,
        "implementation": chosen.name,
        "us": round(took, 2),
        "floor_us": None if least is None else round(least, 2),
        "of_floor": None if least is None else round(least / took, 3),
        "bf16_us": round(bf16, 2),
        "over_bf16": round(bf16 / took, 3),
        "gb_per_s": round(cost.bytes / took / 1e3),
        "tflops": round(cost.flops / took / 1e6, 1),
    }
    yield line | {"tile": None if tile is None else vars(tile)}
    for other in tiles(rows, packed[0]) if every_tile and rows <= MAX_ROWS else []:
        calls = [partial(multiply, SmallMProduct(x, one), other) for one in packed]
        seconds = time_replayed(calls, estimate=guess).seconds
        yield {key: line[key] for key in ("model", "product", "scheme", "rows")} | {
            "us": round(1e6 * seconds, 2),
            "tile": vars(other),
        }


def tiles(rows: int, weight: QuantizedWeight) -> Iterator[SmallMTile]:
    """All that could serve: of every shape and split, and those that read straight to registers."""
    (out, width), group = weight.shape, weight.columns if weight.columns < weight.shape[1] else 0
    early = DeviceLimits.of(weight.device).capability >= (9, 0)
    if weight.kind in _IN_8_BITS and not group:
        for columns, block, warps in product((2, 4, 8), (1024, 2048, 4096, 16384), (4, 8)):
            tile = SmallMTile("gemv", columns, block, warps, early=early)
            if tile.fits(rows, out, width) and block // 2 < width:
                yield tile
    if weight.kind == "int4" and rows == 1 and width <= GEMV_WIDTH and in_chunks(width, group):
        block = max(1024, next_power_of_2(width))
        for columns, warps in product((4, 8, 16), (1, 2, 4, 8)):
            if block * columns <= 2 * 512 * 32 * warps:  # bytes that a thread has registers for
                yield SmallMTile("gemv", columns, block, warps, early=early)
    for shape in {shape for most in (8, 16, 64, 256) for shape in dot_shapes(most)}:
        for tile in dot_tiles(shape, rows, out, width, weight.kind, group):
            yield tile
            if early:
                yield replace(tile, early=True)
                yield replace(tile, early=True, prefetch=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8B,0.6B")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,1024,8192")
    parser.add_argument("--tiles", action="store_true", help="of few rows, time every tile that could serve")
    asked = gpu_arguments(parser)
    lines = GpuLines("benchmarks.quantized_products", asked.save)
    for model in asked.models.split(","):
        for name in MODELS[model]:
            for scheme in asked.schemes.split(","):
                for rows in map(int, asked.rows.split(",")):
                    for found in measure(model, name, scheme, rows, asked.tiles):
                        lines.put(found)


if __name__ == "__main__":
    main()
