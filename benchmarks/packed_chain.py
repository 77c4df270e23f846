"""Tiles of products of few rows by packed weights, in a chain of layers of 8B on a GPU, as decode steps launch them.

    python -m benchmarks.packed_chain --scheme fp8 --rows 1 --save chain.jsonl

Alone a product overlaps with copies of itself; in a step it waits for the one before it and begins while that one ends,
so other tiles are fastest. This changes one product's tile at a time, of those that could serve, and keeps it if the
chain is faster: lines of JSON with the microseconds of a layer, attention left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from benchmarks.quantized_products import MODELS, tiles
from strata.hardware.replay import time_replayed
from strata.kernels.linear.quantized.small_m import chosen_tile
from strata.kernels.linear.small_m import SmallMProduct, multiply
from strata.kernels.linear.small_m_tiles import SmallMTile
from strata.kernels.quant.quantized import QuantizedWeight, pack
from strata.kernels.quant.schemes import SCHEMES

SHAPES = MODELS["8B"]
# As a model has, so that the scales of all do not stay in the L2 cache either.
LAYERS = 32
EPS = 1e-5


class Chain:
    """The four fused products of each layer, each reading what the one before it wrote."""

    def __init__(self, scheme: str, rows: int) -> None:
        self.weights: dict[str, list[QuantizedWeight]] = {}
        for name, (out, width) in SHAPES.items():
            one = pack(torch.randn(out, width) * width**-0.5, SCHEMES[scheme]).to("cuda")
            copies = [{field: held.clone() for field, held in one.tensors.items()} for _ in range(LAYERS - 1)]
            self.weights[name] = [one, *(one.with_tensors(copy) for copy in copies)]
        hidden = SHAPES["o"][0]
        self.x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        self._norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def chosen(self) -> dict[str, SmallMTile]:
        """What serves each product now."""
        found = {}
        for name, (_, width) in SHAPES.items():
            tile = chosen_tile(self.x.new_empty(len(self.x), width), self.weights[name][0])
            assert tile is not None
            found[name] = tile
        return found

    def run(self, by: Mapping[str, SmallMTile]) -> Tensor:
        total, weighted, squares = self.x, self.x, self.x.float().square().sum(-1, keepdim=True)
        hidden = self.x.shape[1]
        for layer in range(LAYERS):
            qkv, o, gate_up, down = (self.weights[name][layer] for name in ("qkv", "o", "gate_up", "down"))
            scale: dict[str, Any] = {"squares": squares, "eps": EPS}
            (heads,) = multiply(SmallMProduct(weighted, qkv, **scale), by["qkv"])
            add: dict[str, Any] = {"residual": total, "norm_weight": self._norm}
            total, weighted, squares = multiply(SmallMProduct(heads[:, :hidden], o, **add), by["o"])
            scale = {"squares": squares, "eps": EPS, "gated": True}
            (inner,) = multiply(SmallMProduct(weighted, gate_up, **scale), by["gate_up"])
            add = {"residual": total, "norm_weight": self._norm}
            total, weighted, squares = multiply(SmallMProduct(inner, down, **add), by["down"])
        return total

    def microseconds(self, by: Mapping[str, SmallMTile]) -> float:
        """Of a layer, recorded."""
        return 1e6 / LAYERS * time_replayed([lambda: self.run(by)], estimate=5e-4).seconds


def descend(chain: Chain, seconds: float) -> Iterator[dict[str, Any]]:
    """What each change of the chosen tiles came to, until the time is up; the last is the best of all."""
    end, best = time.monotonic() + seconds, chain.chosen()
    least = chain.microseconds(best)
    yield {"changed": None, "us": least, "tiles": {name: vars(tile) for name, tile in best.items()}}
    for name in ("gate_up", "down", "qkv", "o"):
        for tile in tiles(len(chain.x), chain.weights[name][0]):
            if time.monotonic() > end:
                break
            took = chain.microseconds(best | {name: tile})
            yield {"changed": name, "us": took, "tile": vars(tile)}
            if took < least:
                least, best = took, best | {name: tile}
    yield {"changed": None, "us": least, "tiles": {name: vars(tile) for name, tile in best.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", choices=SCHEMES, default="fp8")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="after which no tile is tried anymore [300]")
    asked = gpu_arguments(parser)
    lines = GpuLines("benchmarks.packed_chain", asked.save, scheme=asked.scheme, rows=asked.rows)
    for found in descend(Chain(asked.scheme, asked.rows), asked.seconds):
        lines.put(found)


if __name__ == "__main__":
    main()
