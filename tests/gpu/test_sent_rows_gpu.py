"""Messages between GPUs have the bits of their references, replayed too; rows for experts come back as their sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strata.comm.experts.rows import combine_rows, dispatch_rows
from strata.comm.experts.sent_rows import return_rows, send_rows, slot_span
from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import all_gather, all_reduce
from strata.comm.reduced_norm import all_reduce_add_rms_norm
from strata.comm.symmetric import with_symmetric_memory
from strata.kernels.moe.combine import combine
from strata.kernels.moe.experts import experts
from strata.kernels.norm.norm import add_rms_norm
from tests.gpu.ranks import found_by_ranks
from tests.largest import largest

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


def messages(world: World) -> dict[str, Any]:
    axis = with_symmetric_memory(Mesh.of(world, {"tp": world.size}).axis("tp"), world.device)
    found: dict[str, Any] = {"symmetric": axis.symmetric is not None}
    found |= {"sums": wrong_sums(axis, world.device), "gathers": wrong_gathers(axis, world.device)}
    return found | {"replays": wrong_replays(axis, world.device)}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_messages_have_the_bits_of_their_references(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(messages, ranks, tmp_path, timeout=200):
        assert found == {"symmetric": True, "sums": [], "gathers": [], "replays": []}


def rows_of(rank: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1000 * rows + rank)
    return torch.randn(rows, 2048, generator=generator, device=device).to(dtype)


def wrong_messages(world: World) -> list[str]:
    """Which results are not those of all ranks' rows."""
    axis = with_symmetric_memory(Mesh.of(world, {"tp": world.size}).axis("tp"), world.device)
    device = world.device
    wrong = []
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 7, 64, 500):
            x = rows_of(axis.index, rows, dtype, device)
            wanted = torch.cat([rows_of(rank, rows, dtype, device) for rank in range(axis.size)])
            for one in dispatch_rows.bind("cuda").candidates:
                if one.supports is None or one.supports(x, axis):
                    wrong += [f"dispatch, {one.name}, {rows} rows, {dtype}"] * (
                        not torch.equal(one.run(x, axis), wanted)
                    )
            parts = [rows_of(10 + rank, rows * axis.size, dtype, device) for rank in range(axis.size)]
            total = torch.stack(parts).double().sum(0).chunk(axis.size)[axis.index]
            for one in combine_rows.bind("cuda").candidates:
                if one.supports is None or one.supports(parts[axis.index], axis):
                    found = one.run(parts[axis.index], axis)
                    close = found.shape == total.shape and torch.allclose(found.double(), total, rtol=2e-2, atol=5e-2)
                    wrong += [f"combine, {one.name}, {rows} rows, {dtype}"] * (not close)
    return wrong


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_go_to_all_ranks_and_their_sums_come_back(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(wrong_messages, ranks, tmp_path, timeout=200):
        assert found == []


COUNT, HIDDEN, WIDTH, PER_TOKEN = 16, 1024, 256, 4


@torch.inference_mode()
def errors_of_sums(world: World) -> list[float]:
    """Of rows of any number, of none but padding, and of some that all want the experts of one rank."""
    axis, device = Mesh.of(world, {"tp": world.size}).axis("tp"), world.device
    generator, found = torch.Generator(device).manual_seed(0), []
    shapes = (COUNT, 2 * WIDTH, HIDDEN), (COUNT, HIDDEN, WIDTH)
    gate_up, down = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) / 16 for shape in shapes
    )
    first, end = slot_span(COUNT, axis.size, axis.index)
    own = torch.Generator(device).manual_seed(1 + axis.index)
    for tokens, padding, taste in ((500, 0, 0.0), (64, 64 * (axis.index == 1), 0.0), (3, 0, 0.0), (200, 7, 9.0)):
        x = torch.randn(tokens, HIDDEN, generator=own, device=device, dtype=torch.bfloat16)
        scores = torch.rand(tokens, COUNT, generator=own, device=device)
        scores[:, :PER_TOKEN] += taste
        weights, chosen = scores.topk(PER_TOKEN)
        mapping = torch.arange(tokens, dtype=torch.int32, device=device)
        mapping[tokens - padding :] = -1
        wanted = experts.reference(x, weights, chosen, gate_up, down).float()
        wanted[mapping < 0] = 0
        arrived = send_rows.bind("cuda")(x, axis, weights, chosen, axis.index, COUNT, None, mapping)
        given = arrived.rows, arrived.weights, arrived.numbers
        made = experts.bind("cuda")(*given, gate_up[first:end], down[first:end], arrived.products)
        back = return_rows.bind("cuda")(made, axis, arrived.sent, arrived.received)
        result = combine.bind("cuda")(back, arrived.source, arrived.inverse, None).float()
        found.append(float((result - wanted).norm() / wanted.norm().clamp(min=1e-6)))
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_rows_come_back_as_sums_of_their_experts(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(errors_of_sums, ranks, tmp_path, timeout=200):
        assert largest(found) < 2e-2
