"""Products and sums between GPUs: sent by the product's programs, or under way beside others; eager and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import all_gather, all_reduce
from strata.comm.peer_copies import with_peer_copies
from strata.comm.reduced_norm import linear_all_reduce_add_rms_norm
from strata.comm.symmetric import with_symmetric_memory
from strata.comm.under_way import finish_add_rms_norm, finish_all_reduce, start_all_reduce
from strata.kernels.linear.linear import linear
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.norm.norm import add_rms_norm
from strata.kernels.op import Implementation
from tests.gpu.ranks import found_by_ranks

pytestmark = pytest.mark.gpu

EPS = 1e-5
REPLAYS = 1000
LAYERS, HIDDEN, HEADS, INNER = 6, 4096, 2048, 7168
_BOUND = linear_all_reduce_add_rms_norm.bind("cuda")
APART = next(one for one in _BOUND.candidates if one.name == "apart")
# Rows, out, width.
SHAPES = (
    (1, 4096, 2048),
    (1, 4096, 7168),
    (1, 4096, 4096),
    (1, 1024, 1024),
    (2, 4096, 2048),
    (3, 4096, 2048),
    (8, 2048, 2048),
)


def numbers(seed: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def wrong_products(axis: Axis, device: torch.device) -> list[str]:
    """Which results do not have the bits of what is stored and then sent, or were not sent though a row was alone."""
    wrong = []
    for dtype in (torch.bfloat16, torch.float16):
        for rows, out, width in SHAPES:
            given: dict[str, Any] = {"dtype": dtype, "device": device}
            x, weight = numbers(axis.index, rows, width, **given), numbers(10 + axis.index, out, width, **given) / 32
            residual, norm_weight = numbers(20, rows, out, **given), numbers(21, out, **given)
            call = (x, axis, weight, residual, norm_weight, EPS)
            chosen = _BOUND.choose(*call)
            same = all(map(torch.equal, chosen.run(*call), APART.run(*call)))
            if not same or (rows == 1 and chosen.name != "one shot"):
                wrong.append(f"{rows} rows of {width} to {out} by {chosen.name}, {dtype}")
    return wrong


class Layers:
    """Decode steps of one sequence without attention: products and messages, each beside the kernel ahead of it."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        def drawn(seed: int, out: int, width: int) -> Tensor:
            return numbers(100 * axis.index + seed, out, width, dtype=torch.bfloat16, device=device) / width**0.5

        self._axis = axis
        self._first, self._out = drawn(1, HEADS, HIDDEN), drawn(2, HIDDEN, HEADS)
        self._gate_up, self._down = drawn(3, 2 * INNER, HIDDEN), drawn(4, HIDDEN, INNER)
        self._norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)

    def run(self, row: Tensor, send: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        multiply, gate = linear.bind("cuda"), linear_silu_mul.bind("cuda")
        total, normed = row, row
        for _ in range(LAYERS):
            attended = multiply(normed, self._first)
            total, normed = send(attended, self._axis, self._out, total, self._norm, EPS)
            gated = gate(normed, self._gate_up, None)
            total, normed = send(gated, self._axis, self._down, total, self._norm, EPS)
        return torch.cat((total, normed))


def wrong_products_replayed(axis: Axis, device: torch.device) -> list[int]:
    """How many replays of a graph gave other bits in one of both ways, or between them wrong sums of other messages."""
    layers, row = Layers(axis, device), torch.empty(1, HIDDEN, dtype=torch.bfloat16, device=device)
    key = torch.empty(1, 1, dtype=torch.int64, device=device)
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    sent: Implementation = _BOUND.candidates[0]
    ranks = torch.arange(axis.size, device=device)

    def run() -> None:
        found = layers.run(row, sent.run)
        summed, gathered = all_reduce.bind("cuda")(key.float(), axis), all_gather.bind("cuda")(key, axis, 1)
        wanted = layers.run(row, APART.run)
        wrong[0] += (found != wanted).any() | found.isnan().any()
        first = key - axis.index
        wrong[1] += (gathered != first + ranks).any() | (summed != axis.size * first + ranks.sum()).any()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        row.zero_()
        key.fill_(axis.index)
        run()
        stream.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
        wrong.zero_()
        for replay in range(REPLAYS):
            row.copy_(numbers(replay, 1, HIDDEN, dtype=torch.bfloat16, device=device))
            key.fill_(axis.index + replay)
            graph.replay()
    stream.synchronize()
    return wrong.tolist()


def sent_products(world: World) -> dict[str, Any]:
    axis = with_symmetric_memory(Mesh.of(world, {"tp": world.size}).axis("tp"), world.device)
    found: dict[str, Any] = {"symmetric": axis.symmetric is not None}
    return found | {
        "products": wrong_products(axis, world.device),
        "replays": wrong_products_replayed(axis, world.device),
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_is_sent_has_the_bits_of_what_is_stored(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(sent_products, ranks, tmp_path, timeout=200):
        assert found == {"symmetric": True, "products": [], "replays": [0, 0]}


ROWS, WIDTH, ROUNDS, STEP_REPLAYS = 2048, 4096, 6, 50  # sums whose few digits bfloat16 holds


def steps(axis: Axis, parts: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Products of each part, and sums over the ranks of what these make: two under way, each part with two slots."""
    start, finish = start_all_reduce.bind("cuda"), finish_all_reduce.bind("cuda")
    pending = [start(part @ weight, axis, number) for number, part in enumerate(parts)]
    for turn in range(1, ROUNDS):
        for number in range(len(parts)):
            pending[number] = start(finish(pending[number]) @ weight, axis, number + turn % 2 * len(parts))
    return [finish(one) for one in pending]


def wrong_norms(axis: Axis, device: torch.device) -> list[str]:
    """Where the norm behind a sum has other bits than the sum, and the norm after it."""
    start, finish = start_all_reduce.bind("cuda"), finish_all_reduce.bind("cuda")
    wrong = []
    for seed, (rows, width) in enumerate(((1, 4096), (7, 1024), (300, 8192), (2048, 4096))):
        generator = torch.Generator(device).manual_seed(10 * seed + axis.index)
        x = torch.randn(rows, width, generator=generator, device=device).bfloat16()
        residual, weight = torch.sin(torch.arange(2.0 * width, device=device)).bfloat16().chunk(2)
        carried = torch.stack((residual, -residual)).repeat(rows, 1)[::2]
        wanted = add_rms_norm.bind("cuda")(finish(start(x.clone(), axis, 0)), carried, weight, 1e-5)
        found = finish_add_rms_norm.bind("cuda")(start(x.clone(), axis, 1), carried, weight, 1e-5)
        if not all(map(torch.equal, found, wanted)):
            wrong.append(f"{rows} {width}")
    return wrong


def wrong_of(axis: Axis, device: torch.device) -> list[str]:
    """What is not as it should be: numbers times an identity, multiplied by the number of ranks in every round."""
    weight = torch.eye(WIDTH, dtype=torch.bfloat16, device=device)
    parts = [torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device=device) for _ in range(2)]
    wrong = []

    def fill(step: int) -> list[int]:
        for number, part in enumerate(parts):
            part.fill_(axis.index + number + step % 3)
        first = [sum(range(axis.size)) + axis.size * (number + step % 3) for number in range(2)]
        return [one * axis.size ** (ROUNDS - 1) for one in first]

    def check(name: str, step: int, results: list[Tensor], wanted: list[int]) -> None:
        if not all(bool((one == want).all()) for one, want in zip(results, wanted, strict=True)):
            wrong.append(f"{name} {step}")

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.inference_mode():
        for step in range(3):
            wanted = fill(step)
            check("eager", step, steps(axis, parts, weight), wanted)
        stream.synchronize()
        graph.capture_begin()
        results = steps(axis, parts, weight)
        graph.capture_end()
        for step in range(STEP_REPLAYS):
            wanted = fill(step)
            graph.replay()
            check("replay", step, results, wanted)
            if step % 10 == 9:
                wanted = fill(step)
                check("between", step, steps(axis, parts, weight), wanted)
    graph.reset()
    return wrong


def sums_under_way(world: World) -> dict[str, Any]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    copies = with_peer_copies(with_symmetric_memory(axis, world.device), world.device, 4, ROWS * WIDTH * 2)
    found: dict[str, Any] = {"copies": copies.copies is not None}
    for name, one in (("nccl", axis), ("copy engines", copies)):
        found[name] = wrong_of(one, world.device) + wrong_norms(one, world.device)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_beside_products(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(sums_under_way, ranks, tmp_path, timeout=200):
        assert found == {"copies": ranks == 2, "nccl": [], "copy engines": []}
