"""Sums and all-gathers through symmetric memory on several GPUs: the bits of their references, replayed too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import all_gather, all_reduce
from strata.comm.reduced_norm import all_reduce_add_rms_norm
from strata.comm.symmetric import with_symmetric_memory
from strata.kernels.norm.norm import add_rms_norm
from tests.gpu.ranks import found_by_ranks

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 2), (3, 1026), (8, 4096), (7, 8190), (33, 4098), (128, 4096), (500, 4096), (1000, 2050))
REPLAYS = 1000
# Shape, dimension, dtype, and what gathers: rows of no whole words and messages over 64 KiB are NCCL's.
GATHERED = (
    ((1, 1), 1, torch.int64, "one shot"),
    ((257, 1), -1, torch.int64, "one shot"),
    ((33, 1), 1, torch.int32, "one shot"),
    ((7, 3), 1, torch.float32, "one shot"),
    ((3, 5, 6), 1, torch.bfloat16, "one shot"),
    ((2, 3, 50), 2, torch.bfloat16, "one shot"),
    ((8, 4096), 1, torch.bfloat16, "one shot"),
    ((7, 3), 1, torch.bfloat16, "nccl"),
    ((9, 4096), 1, torch.bfloat16, "nccl"),
)


def numbers(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def wrong_sums(axis: Axis, device: torch.device) -> list[str]:
    """Which results do not have the bits of the reference, or lie far from NCCL's."""
    wrong = []
    for seed, (dtype, shape) in enumerate((dtype, shape) for dtype in DTYPES for shape in SHAPES):
        x = numbers(axis.index, seed, shape, dtype, device)
        wanted, by_library = all_reduce.reference(x, axis), x.clone()
        dist.all_reduce(by_library, group=axis.group)
        for one in all_reduce.bind("cuda", deterministic=True).candidates:
            if one.supports is None or one.supports(x, axis):
                found = one.run(x, axis)
                close = torch.allclose(found.float(), by_library.float(), rtol=2e-2, atol=5e-2)
                if not (torch.equal(found, wanted) and close):
                    wrong.append(f"{one.name} of {shape}, {dtype}")
        residual, weight = (numbers(9, seed, size, dtype, device) for size in (shape, (1, shape[1])))
        total, normed = all_reduce_add_rms_norm.bind("cuda")(x, axis, residual, weight[0], 1e-5)
        want_total, want_normed = add_rms_norm.reference(wanted, residual, weight[0], 1e-5)
        if not (torch.equal(total, want_total) and torch.allclose(normed.float(), want_normed.float(), rtol=2e-2)):
            wrong.append(f"with norm, {shape}, {dtype}")
    return wrong


def wrong_gathers(axis: Axis, device: torch.device) -> list[str]:
    """Which results do not have the bits of the reference, or come by something else."""
    wrong = []
    for seed, (shape, dim, dtype, by) in enumerate(GATHERED):
        x = (1000 * numbers(axis.index, seed, shape, torch.float32, device)).to(dtype)
        chosen = all_gather.bind("cuda", deterministic=True).choose(x, axis, dim)
        if chosen.name != by or not torch.equal(chosen.run(x, axis, dim), all_gather.reference(x, axis, dim)):
            wrong.append(f"{shape} along {dim} by {chosen.name}, {dtype}")
    return wrong


def wrong_replays(axis: Axis, device: torch.device) -> list[int]:
    """Which replays of a graph, each over new numbers, gave wrong results: all kernels in turns, larger and smaller."""
    shapes = ((8, 4096), (1000, 2050), (128, 4096))
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    keys = torch.empty((33, 1), dtype=torch.int64, device=device)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
    ranks = torch.arange(axis.size, device=device)

    def run() -> list[Tensor]:
        run_one, run_norm = all_reduce.bind("cuda"), all_reduce_add_rms_norm.bind("cuda")
        sums, gathered = [run_one(x, axis) for x in inputs], all_gather.bind("cuda")(keys, axis, 1)
        return [*sums, gathered, run_norm(inputs[0], axis, inputs[0], weight, 1e-5)[0]]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for x in (*inputs, keys):
            x.zero_()
        run()
        stream.synchronize()
        graph.capture_begin()
        results = run()
        graph.capture_end()
        wrong = []
        for replay in range(REPLAYS):
            for x in (*inputs, keys):
                x.fill_(axis.index + replay % 16)
            graph.replay()
            if replay % 50 == 49:
                whole = sum(range(axis.size)) + axis.size * (replay % 16)
                wanted = [whole, whole, whole, ranks + replay % 16, whole + axis.index + replay % 16]
                if any(not bool((one == w).all()) for one, w in zip(results, wanted, strict=True)):
                    wrong.append(replay)
    return wrong


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_messages_have_the_bits_of_their_references(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(__name__, ranks, tmp_path, timeout=200):
        assert found == {"symmetric": True, "sums": [], "gathers": [], "replays": []}


def main() -> None:
    """One rank."""
    from strata.comm.launch import join_world

    with join_world("cuda", timeout_seconds=60) as world:
        axis = with_symmetric_memory(Mesh.of(world, {"tp": world.size}).axis("tp"), world.device)
        found: dict[str, Any] = {"symmetric": axis.symmetric is not None}
        found |= {"sums": wrong_sums(axis, world.device), "gathers": wrong_gathers(axis, world.device)}
        found["replays"] = wrong_replays(axis, world.device)
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
