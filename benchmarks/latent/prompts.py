"""Latent attention of prompts that begin in a step, on one GPU: absorbed, and expanded as launched and as recorded.

    python -m benchmarks.latent.prompts --steps 1x8192,4x2048,16x512 --save latent_prompts.jsonl
    python -m benchmarks.latent.prompts --steps 4x2048 --tiles

Heads of DeepSeek-V2-Lite in bfloat16, which take turns over operands, so that caches hold little of the next. A step of
4x2048 has four prompts of 2,048 tokens. "recorded": only the device knows that they begin. With --tiles the kernel over
expanded keys alone, by tiles. `tflops` counts what the cheaper form does (the cost of `latent_attention`), of a tile
the pairs of queries and keys. `difference`: the largest from the absorbed form, as a share of its largest element.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.hardware import roofline
from strata.hardware.replay import copies_beyond_l2, time_replayed
from strata.hardware.roofline import Workload
from strata.hardware.specs import recognize
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.attention.varlen_triton import Tile
from strata.kernels.latent.attention import ABSORBED, PROMPTS_EXPANDED, latent_attention
from strata.kernels.latent.expanded_cuda import expanded_prompts
from strata.kernels.latent.expanded_triton import expanded_tile
from strata.kernels.latent.forms import Dims, visible
from strata.kernels.state.paged import PagedKV

DIMS, PAGE = Dims(heads=16, nope=128, rope=64, rank=512, value=128), 16
SPEC = AttentionSpec(0, (DIMS.nope + DIMS.rope) ** -0.5)
# Queries, keys, warps, stages and registers of the tiles that are tried: all fit, and none spills on Hopper.
TILES = (
    (128, 64, 8, 2, None),
    (128, 64, 8, 3, None),
    (128, 128, 8, 2, None),
    (128, 32, 8, 3, 128),
    (64, 64, 4, 2, None),
    (64, 32, 4, 3, None),
)
Call = tuple[Tensor, Tensor, Tensor, Sequences, AttentionSpec]


def make(prompts: int, tokens: int) -> Call:
    """A step of prompts of so many tokens each, their rows in pages in disorder, as the host knows it."""
    count, width = prompts * tokens, DIMS.rank + DIMS.rope
    q = torch.randn(count, DIMS.heads, DIMS.nope + DIMS.rope, device="cuda").bfloat16()
    row = torch.randn(count, width, device="cuda").bfloat16()
    weight = (torch.randn(DIMS.heads * (DIMS.nope + DIMS.value), DIMS.rank, device="cuda") * DIMS.rank**-0.5).bfloat16()
    each = -(-tokens // PAGE)
    tables = torch.randperm(prompts * each, device="cuda").int().view(prompts, each)
    pool = torch.zeros(prompts * each, PAGE, 1, width, dtype=row.dtype, device="cuda")
    places = torch.arange(tokens, device="cuda")
    slots = (tables[:, places // PAGE] * PAGE + places % PAGE).flatten()
    pool.flatten(0, 2)[slots.long()] = row
    lengths = torch.full((prompts,), tokens, dtype=torch.int32, device="cuda")
    offsets = torch.arange(prompts + 1, device="cuda", dtype=torch.int32) * tokens
    bounds = torch.tensor([0, prompts], dtype=torch.int32, device="cuda")
    parts = BatchSplit(torch.zeros_like(lengths), offsets[:-1].clone(), bounds, 0, begin=True)
    pages = PagedKV((pool,), (pool,), tables, lengths, slots.int(), parts=parts)
    return q, row, weight, Sequences(offsets, tokens, pages), SPEC


def captured(call: Call) -> Call:
    q, row, weight, batch, spec = call
    assert batch.pages is not None
    assert batch.pages.parts is not None
    parts = replace(batch.pages.parts, decodes=None, begin=False)
    return q, row, weight, batch._replace(pages=replace(batch.pages, parts=parts)), spec


def copies(call: Call, prompts: int, tokens: int) -> list[Call]:
    count = copies_beyond_l2(call[0].nbytes + call[1].nbytes)
    return [call, *(make(prompts, tokens) for _ in range(count - 1))]


def forms(prompts: int, tokens: int) -> Iterator[dict[str, object]]:
    calls = copies(make(prompts, tokens), prompts, tokens)
    on_cuda = (made for made in latent_attention.implementations if made.device == "cuda")
    run = {made.name: latent_attention.of_arguments(made.run) for made in on_cuda}
    workload = Workload((tokens,) * prompts, (tokens,) * prompts)
    cost = latent_attention.cost(*calls[0], workload=workload)
    known = recognize(torch.cuda.get_device_name())
    floor = None if known is None else round(1e6 * roofline.floor(cost, known, "bfloat16").seconds, 1)
    wanted = run[ABSORBED](*calls[0]).float()
    chosen = latent_attention.bind("cuda").choose(*calls[0]).name
    for name, form, some in (
        ("absorbed", ABSORBED, calls),
        ("absorbed, recorded", ABSORBED, [captured(call) for call in calls]),
        ("expanded", PROMPTS_EXPANDED, calls),
        ("expanded, recorded", PROMPTS_EXPANDED, [captured(call) for call in calls]),
    ):
        difference = (run[form](*some[0]).float() - wanted).abs().max() / wanted.abs().max()
        seconds = time_replayed([partial(run[form], *call) for call in some]).seconds
        found: dict[str, object] = {"prompts": prompts, "tokens": tokens, "form": name, "is_chosen": form == chosen}
        found |= {"us": round(seconds * 1e6, 1), "floor_us": floor, "tflops": round(cost.flops / seconds / 1e12, 1)}
        yield found | {"difference": round(float(difference), 5)}


def tiles(prompts: int, tokens: int) -> Iterator[dict[str, object]]:
    calls = copies(make(prompts, tokens), prompts, tokens)
    flops = 2 * DIMS.heads * (DIMS.nope + DIMS.rope + DIMS.value) * prompts * visible(tokens, tokens)
    rule = expanded_tile(torch.bfloat16)
    given: list[tuple[Any, ...]] = []
    for q, row, weight, batch, spec in calls:
        assert batch.pages is not None
        assert batch.pages.parts is not None
        parts, out = batch.pages.parts, torch.empty_like(q[..., : DIMS.value], memory_format=torch.contiguous_format)
        made = F.linear(row[:, : DIMS.rank], weight)
        given.append((out, q, made, row, batch, batch.pages, spec, DIMS, parts.starts, parts.bounds))
    for tile in dict.fromkeys((rule, *(Tile(*one) for one in TILES))):
        seconds = time_replayed([partial(expanded_prompts, *one, tile) for one in given]).seconds
        found: dict[str, object] = {"prompts": prompts, "tokens": tokens, "form": "kernel", "is_rule": tile == rule}
        found |= {"us": round(seconds * 1e6, 1), "tflops": round(flops / seconds / 1e12, 1)}
        yield found | {"tile": asdict(tile)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="1x8192,4x2048,16x512")
    parser.add_argument("--tiles", action="store_true", help="the kernel over expanded keys alone, by tiles")
    arguments = gpu_arguments(parser)
    lines = GpuLines("benchmarks.latent.prompts", arguments.save)
    for step in arguments.steps.split(","):
        prompts, tokens = map(int, step.split("x"))
        for found in (tiles if arguments.tiles else forms)(prompts, tokens):
            lines.put(found)


if __name__ == "__main__":
    main()
