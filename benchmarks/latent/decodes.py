"""Decodes over latents on one GPU, with the kernel that joins their splits, beside the bytes of the latents.

    python -m benchmarks.latent.decodes --steps 64x8192,1x8192 --save latent_decodes.jsonl
    python -m benchmarks.latent.decodes --steps 64x8192 --tiles

Heads of DeepSeek-V2-Lite in bfloat16. Calls take turns over pools that caches hold little of. A step of 64x8192 has 64
sequences of 8,192 tokens. With --tiles also tiles that the rule does not choose; those that do not fit are left out.
`difference`: the largest from the rule's result.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.hardware.replay import copies_beyond_l2, time_replayed
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.latent import cuda
from strata.kernels.latent.cuda import LatentTile, decode_tile
from strata.kernels.latent.forms import Dims
from strata.kernels.state.paged import PagedKV

DIMS, PAGE = Dims(heads=16, nope=128, rope=64, rank=512, value=128), 16
WIDTH = DIMS.rank + DIMS.rope
SPEC = AttentionSpec(0, (DIMS.nope + DIMS.rope) ** -0.5)
MAX_POOLS = 6


def pages_of(sequences: int, tokens: int) -> PagedKV:
    """One layer of random pages, in disorder."""
    each = -(-tokens // PAGE)
    count = sequences * each
    rows = torch.randn(count, PAGE, 1, WIDTH, device="cuda").bfloat16()
    tables = torch.randperm(count, device="cuda").int().view(sequences, each)
    lengths = torch.full((sequences,), tokens, dtype=torch.int32, device="cuda")
    return PagedKV((rows,), (), tables, lengths, tables[:, -1] * PAGE + (tokens - 1) % PAGE)


def others(rule: LatentTile, tokens: int) -> Iterator[LatentTile]:
    """Tiles beside that of the rule."""
    for rows, warps, stages, split, splits in product(
        (16, 32, 64), (4, 8), (1, 2, 3, 4), (128, 256), (1, 2, 4, 8, 16, 32, 64)
    ):
        if splits <= max(1, tokens // split):
            yield replace(rule, rows=rows, warps=warps, stages=stages, split=split, splits=splits)


def measured(sequences: int, tokens: int, every_tile: bool) -> Iterator[dict[str, object]]:
    nbytes = 2 * sequences * tokens * WIDTH
    pools = [pages_of(sequences, tokens) for _ in range(min(MAX_POOLS, copies_beyond_l2(nbytes)))]
    latent = torch.randn(sequences, DIMS.heads, DIMS.rank, device="cuda").bfloat16()
    q = torch.randn(sequences, DIMS.heads, DIMS.nope + DIMS.rope, device="cuda").bfloat16()
    rule = decode_tile(DIMS.heads, DIMS.rank, latent.dtype, sequences, tokens)
    expected = None
    for tile in dict.fromkeys((rule, *(others(rule, tokens) if every_tile else ()))):
        results = [torch.full_like(latent, float("nan")) for _ in pools]
        calls = [
            partial(cuda.decode, result, latent, q, pages, pages.lengths, SPEC, DIMS, tile=tile)
            for result, pages in zip(results, pools, strict=True)
        ]
        try:
            calls[0]()
        except OutOfResources:
            continue
        expected = results[0].float() if expected is None else expected
        difference = (results[0].float() - expected).abs().max().item()
        seconds = time_replayed(calls).seconds
        found: dict[str, object] = {"test": "latent decodes", "sequences": sequences, "keys": tokens}
        found |= {"us": round(seconds * 1e6, 1), "tb_per_s": round(nbytes / seconds / 1e12, 2)}
        yield found | {"difference": difference, "is_rule": tile == rule, "tile": asdict(tile)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="64x8192,16x32768,128x2048,256x1024,32x1024,8x4096,1x8192")
    parser.add_argument("--tiles", action="store_true", help="also tiles that the rule does not choose")
    arguments = gpu_arguments(parser)
    lines = GpuLines("benchmarks.latent.decodes", arguments.save)
    for step in arguments.steps.split(","):
        sequences, tokens = map(int, step.split("x"))
        for found in measured(sequences, tokens, arguments.tiles):
            lines.put(found)


if __name__ == "__main__":
    main()
