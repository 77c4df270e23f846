"""Attention over the keys that prompts and decodes keep, on one GPU, beside attention over all keys.

    python -m benchmarks.sparsity.attention --tokens 65536 --shares 0.9,0.95,0.98 --save sparse.jsonl
    python -m benchmarks.sparsity.attention --decode 1x65536,32x16384 --pages 64,128,256 --save sparse.jsonl

One layer of 32 query and 8 KV heads of 128, a prompt that runs in chunks of 8,192 tokens over its pages, as in the
engine; times are sums over all chunks. Random keys have no structure: their pooled scores are flat, and a share keeps
as large a share of the blocks. So structure is planted: each block of 128 keys has a direction of its own, and queries
point, beside noise, in those of the first block, their own, and a few others. `--structure 0` plants none.

With --decode a step of sequences with one new token each over as many keys, which chooses so many of their pages of 16;
bounds of the pages that it wrote are found within the time. Layers take turns, so that caches hold little of the next.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.hardware.replay import time_replayed
from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention import mixed as attention_mixed
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.cudnn_prompts import why_no_plan
from strata.kernels.attention.query_chunks import Rows, as_query_chunks, query_chunks
from strata.kernels.attention.sparse import decodes, prompts
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences, SparseCall
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.state.paged import PagedKV

HEADS, KV_HEADS, DIM, PAGE, CHUNK, BLOCK = 32, 8, 128, 16, 8192, 128
SPEC = AttentionSpec(0, DIM**-0.5)


def planted(tokens: int, others: int, strength: float) -> tuple[Tensor, PagedKV]:
    """Queries [tokens, heads, dim] of a whole prompt, and its keys and values in pages in disorder.

    others: blocks that a block of queries points to beside the first and its own. strength: what that adds to scores.
    """
    blocks = tokens // BLOCK
    directions = torch.nn.functional.normalize(torch.randn(blocks, KV_HEADS, DIM, device="cuda"), dim=-1)
    keys = torch.randn(tokens, KV_HEADS, DIM, device="cuda")
    q = torch.randn(tokens, HEADS, DIM, device="cuda")
    if strength > 0:
        size = (strength * DIM**0.5) ** 0.5
        keys += size * directions.repeat_interleave(BLOCK, 0)
        for block in range(blocks):
            chosen = torch.randint(0, block + 1, (others,), device="cuda")
            chosen[:2] = torch.tensor([0, block], device="cuda")
            aim = directions[chosen.unique()].sum(0).repeat_interleave(HEADS // KV_HEADS, 0)
            q[block * BLOCK : (block + 1) * BLOCK] += size * aim
    table = torch.randperm(tokens // PAGE, device="cuda").int()
    pools = torch.empty(2, tokens // PAGE, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    pools[0][table.long()] = keys.bfloat16().unflatten(0, (-1, PAGE))
    pools[1].normal_()
    lengths = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    return q.bfloat16(), PagedKV((pools[0],), (pools[1],), table[None], lengths, table[:0])


def chunks(q: Tensor, pages: PagedKV) -> Iterator[tuple[Any, ...]]:
    """The arguments of attention for each chunk of the prompt; k and v, which pages hold, are only as large."""
    fits = why_no_plan(DeviceLimits.of(q.device), q.dtype, DIM, PAGE) is None
    for first in range(0, len(q), CHUNK):
        part = q[first : first + CHUNK]
        total = first + len(part)
        offsets = torch.tensor([0, len(part)], dtype=torch.int32, device="cuda")
        bounds = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        lengths = torch.full_like(pages.lengths, total)
        tables, chunks = pages.tables.clone(), None
        if fits:
            rows = Rows(part.stride(0), part.stride(0), KV_HEADS * DIM, KV_HEADS * DIM)
            division = query_chunks(offsets, lengths, bounds, rows)
            chunks = as_query_chunks(division, rows)
        parts = BatchSplit(torch.zeros_like(lengths), offsets[:1], bounds, 0, chunks)
        given = replace(pages, tables=tables, lengths=lengths, parts=parts)
        k = part[:, :KV_HEADS]
        yield part, k, k, Sequences(offsets, len(part), given), SPEC


def narrow(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """With tables of as many pages as the chunk sees, as a step has them that is launched eagerly."""
    q, k, v, batch, spec = given
    count = int(batch.pages.lengths[0]) // PAGE
    return q, k, v, batch._replace(pages=replace(batch.pages, tables=batch.pages.tables[:, :count].contiguous())), spec


def over_pages(q: Tensor, k: Tensor, v: Tensor, batch: Sequences, spec: AttentionSpec) -> Tensor:
    out = torch.empty_like(q)
    attention_cuda.prefill(out, q, k, v, batch.offsets, batch, spec)
    return out


def milliseconds(call: Any, steps: list[tuple[Any, ...]]) -> float:
    return 1e3 * sum(time_replayed([partial(call, *given)], repeats=5, estimate=1.0).seconds for given in steps)


def measure(tokens: int, shares: list[float], others: int, strength: float) -> Iterator[dict[str, Any]]:
    q, pages = planted(tokens, others, strength)
    wide = list(chunks(q, pages))
    steps = [narrow(given) for given in wide]
    flops = 4 * HEADS * DIM * tokens * (tokens + 1) / 2
    shape = {"tokens": tokens, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "chunk": CHUNK}
    shape |= {"points_to": others, "strength": strength}
    dense = {"triton": milliseconds(over_pages, steps)}
    if wide[0][3].pages.parts.query_chunks is not None:
        dense["cudnn"] = milliseconds(lambda *given: attention_mixed.attend(AttentionCall(*given)), wide)
    for name, took in dense.items():
        yield shape | {"keys": "all", "by": name, "ms": round(took, 3), "tflops": round(flops / took / 1e9, 1)}
    best = min(dense.values())
    for share in shares:
        choice = BlockChoice(share, min_keys=1)

        def attend(*given: Any, by: BlockChoice = choice) -> Tensor:
            found: Tensor = prompts.attend(SparseCall(*given, by))
            return found

        took = milliseconds(attend, steps)
        chosen = [partial(prompts.choose, q=g[0], kv_heads=KV_HEADS, starts=g[3].offsets) for g in steps]
        calls = [partial(c, batch=g[3], spec=SPEC, choice=choice) for c, g in zip(chosen, steps, strict=True)]
        choosing = 1e3 * sum(time_replayed([call], repeats=5, estimate=1.0).seconds for call in calls)
        kept = sum(int(call()[1].sum()) for call in calls)
        seen = KV_HEADS * (tokens // BLOCK) * (tokens // BLOCK + 1) // 2
        error = size = 0.0
        for given in steps[:: max(1, len(steps) // 4)]:
            wanted, found = over_pages(*given).float(), attend(*given).float()
            error, size = error + float((found - wanted).square().sum()), size + float(wanted.square().sum())
        yield shape | {
            "keys": share,
            "kept": round(kept / seen, 4),
            "ms": round(took, 3),
            "choosing_ms": round(choosing, 3),
            "tflops_of_kept": round(flops * kept / seen / (took - choosing) / 1e9, 1),
            "over_dense": round(best / took, 2),
            "error": round((error / size) ** 0.5, 5),
        }


def decoding(sequences: int, length: int, others: int, strength: float) -> tuple[Any, ...]:
    """The arguments of attention for a step of decodes, with bounds of all pages; structure as for prompts."""
    blocks, size, group = length // BLOCK, (strength * DIM**0.5) ** 0.5, HEADS // KV_HEADS
    directions = torch.nn.functional.normalize(torch.randn(sequences, blocks, KV_HEADS, DIM, device="cuda"), dim=-1)
    chosen = torch.randint(0, blocks, (sequences, others), device="cuda")
    chosen[:, 0], chosen[:, 1] = 0, blocks - 1
    q = torch.randn(sequences, HEADS, DIM, device="cuda")
    count = sequences * length // PAGE
    keys = torch.empty(count, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    tables = torch.randperm(count, device="cuda").int().view(sequences, -1)
    for s in range(sequences):
        own = torch.randn(length, KV_HEADS, DIM, device="cuda") + size * directions[s].repeat_interleave(BLOCK, 0)
        keys[tables[s].long()] = own.bfloat16().unflatten(0, (-1, PAGE))
        q[s] += size * directions[s, chosen[s].unique()].sum(0).repeat_interleave(group, 0)
    bounds = torch.stack(keys.aminmax(dim=1), 1)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device="cuda")
    pages = PagedKV((keys,), (torch.randn_like(keys),), tables, lengths, tables[:0, 0], bounds=(bounds,))
    q = q.bfloat16()
    k = q[:, :KV_HEADS]
    return q, k, k, Sequences(offsets, 1, pages), SPEC


def over_all(q: Tensor, k: Tensor, v: Tensor, batch: Sequences, spec: AttentionSpec) -> Tensor:
    return decode_attention_cuda.decode(q.flatten(1), HEADS, DIM, batch.pages, spec)


def measure_decodes(
    sequences: int, length: int, counts: list[int], others: int, strength: float
) -> Iterator[dict[str, Any]]:
    layers = [decoding(sequences, length, others, strength) for _ in range(max(1, 8 // sequences))]

    def microseconds(call: Any) -> float:
        return 1e6 * time_replayed([partial(call, *given) for given in layers], repeats=9, estimate=1e-4).seconds

    shape = {"sequences": sequences, "length": length, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    shape |= {"page": PAGE, "points_to": others, "strength": strength}
    dense = microseconds(over_all)
    read = 2 * sequences * length * KV_HEADS * DIM * 2
    yield shape | {"pages": "all", "us": round(dense, 1), "gb_per_s": round(read / dense / 1e3, 1)}
    for count in counts:
        choice = PageChoice(count)
        took = microseconds(lambda *given, by=choice: decodes.attend(SparseCall(*given, by)))
        choosing = microseconds(lambda q, k, v, batch, spec, by=choice: decodes.choose(q, batch.pages, spec, by))
        wanted, found = over_all(*layers[0]).float(), decodes.attend(SparseCall(*layers[0], choice)).float()
        yield shape | {
            "pages": count,
            "kept": round(min(1.0, count * PAGE / length), 4),
            "us": round(took, 1),
            "choosing_us": round(choosing, 1),
            "over_dense": round(dense / took, 2),
            "error": round(float((found - wanted).norm() / wanted.norm()), 5),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="65536")
    parser.add_argument("--shares", default="0.9,0.95,0.98,1.0")
    what = "sequences x keys of steps of decodes, instead of prompts"
    parser.add_argument("--decode", nargs="?", const="1x65536,32x16384", help=what)
    parser.add_argument("--pages", default="64,128,256", help="that decodes choose")
    parser.add_argument("--points-to", type=int, default=8, help="blocks that a block of queries points to")
    parser.add_argument("--structure", type=float, default=9.0, help="what that adds to scores")
    asked = gpu_arguments(parser)
    torch.manual_seed(0)
    lines = GpuLines("benchmarks.sparsity.attention", asked.save)
    structure = asked.points_to, asked.structure
    if asked.decode is None:
        shares = [*map(float, asked.shares.split(","))]
        runs = [measure(tokens, shares, *structure) for tokens in map(int, asked.tokens.split(","))]
    else:
        counts, sizes = [*map(int, asked.pages.split(","))], [one.split("x") for one in asked.decode.split(",")]
        runs = [measure_decodes(int(rows), int(length), counts, *structure) for rows, length in sizes]
    for found in chain.from_iterable(runs):
        lines.put(found)


if __name__ == "__main__":
    main()
