"""Attention of decode steps over pages of bfloat16 and of 8 bits, on one GPU: us of a layer, and of other tiles.

    python -m benchmarks.decode_attention --steps 128x4300,32x4300,1x400 --save decode.jsonl
    python -m benchmarks.decode_attention --steps 128x4300 --tiles

Layers of 32 query and 8 KV heads of 128, which take turns, so that caches hold little of the next. The kernel also
rotates queries and keys and writes the step's own rows, as in a step. `rate` counts the bytes of keys and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.hardware.replay import copies_beyond_l2, time_replayed
from strata.kernels.attention.decode_cuda import Unfinished, decode
from strata.kernels.attention.decode_tile import DecodeTile, decode_tile
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.state.paged import PagedKV

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
KINDS = {"bfloat16": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
MAX_LAYERS = 8
# Keys of a block, warps and stages of the tiles that are tried.
TILES = ((32, 1, 3), (32, 2, 3), (64, 1, 2), (64, 2, 2), (64, 2, 3), (64, 2, 4), (64, 4, 3), (128, 4, 2), (128, 4, 3))


def pages_of(sequences: int, keys: int, kind: torch.dtype | None) -> PagedKV:
    """Layers of random pages, in disorder."""
    each = -(-keys // PAGE)
    count = sequences * each
    tables = torch.randperm(count, device="cuda").int().view(sequences, each)
    lengths = torch.full((sequences,), keys, dtype=torch.int32, device="cuda")
    layers = min(MAX_LAYERS, copies_beyond_l2(nbytes(sequences, keys, kind)))

    def pool() -> Tensor:
        if kind is None:
            return torch.randn(count, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        # Any byte from 0 to 99 is a number of e4m3, too.
        return torch.randint(100, (count, PAGE, KV_HEADS, DIM), dtype=torch.int8, device="cuda").view(kind)

    def exponents() -> tuple[Tensor, ...]:
        shape = (count, KV_HEADS, PAGE)
        drawn = [torch.randint(116, 120, shape, dtype=torch.uint8, device="cuda") for _ in range(layers)]
        return () if kind is None else tuple(drawn)

    pools = [tuple(pool() for _ in range(layers)) for _ in "kv"]
    slots = tables[:, -1] * PAGE + (keys - 1) % PAGE
    return PagedKV(pools[0], pools[1], tables, lengths, slots, key_exponents=exponents(), value_exponents=exponents())


def nbytes(sequences: int, keys: int, kind: torch.dtype | None) -> int:
    return 2 * sequences * keys * KV_HEADS * DIM * (2 if kind is None else 1)


def others(rule: DecodeTile, keys: int) -> Iterator[DecodeTile]:
    """Tiles beside that of the rule, with splits half and twice as long as its own."""
    for block, warps, stages in TILES:
        for split in (max(block, rule.split // 2), rule.split, 2 * rule.split):
            if split % block == 0:
                splits = min(max(1, rule.splits * rule.split // split), -(-keys // split))
                yield replace(rule, keys=block, warps=warps, stages=stages, split=split, splits=splits)


def measured(sequences: int, keys: int, name: str, every_tile: bool) -> Iterator[dict[str, object]]:
    kind = KINDS[name]
    pages = pages_of(sequences, keys, kind)
    product = torch.randn(sequences, (HEADS + 2 * KV_HEADS) * DIM, device="cuda").bfloat16()
    angles = torch.rand(sequences, DIM // 2, device="cuda")
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    unfinished = Unfinished(None, None, 0.0, cos, sin)
    rule = decode_tile(HEADS, KV_HEADS, DIM, product.dtype, sequences, keys, rounded=kind is not None)
    for tile in dict.fromkeys((rule, *(others(rule, keys) if every_tile else ()))):
        calls = [
            partial(decode, product, HEADS, DIM, pages, AttentionSpec(layer, DIM**-0.5), unfinished, tile)
            for layer in range(len(pages.keys))
        ]
        seconds = time_replayed(calls).seconds
        rate = nbytes(sequences, keys, kind) / seconds
        found: dict[str, object] = {"sequences": sequences, "keys": keys, "pages": name, "is_rule": tile == rule}
        yield found | {"us": round(seconds * 1e6, 1), "tb_per_s": round(rate / 1e12, 2), "tile": asdict(tile)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="128x4300,32x4300,8x4300,1x4300,128x900,64x900,1x400")
    parser.add_argument("--pages", default=",".join(KINDS), help="bfloat16, fp8, int8")
    parser.add_argument("--tiles", action="store_true", help="also tiles that the rule does not choose")
    arguments = gpu_arguments(parser)
    lines = GpuLines("benchmarks.decode_attention", arguments.save)
    for step in arguments.steps.split(","):
        sequences, keys = map(int, step.split("x"))
        for name in arguments.pages.split(","):
            for found in measured(sequences, keys, name, arguments.tiles):
                lines.put(found)


if __name__ == "__main__":
    main()
