"""Sums that travel beside products on two GPUs, by NCCL and by copy engines: eager and replayed, two parts in turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.comm.mesh import Axis, Mesh
from strata.comm.peer_copies import with_peer_copies
from strata.comm.symmetric import with_symmetric_memory
from strata.comm.under_way import finish_add_rms_norm, finish_all_reduce, start_all_reduce
from strata.kernels.norm.norm import add_rms_norm
from tests.gpu.ranks import found_by_ranks

pytestmark = pytest.mark.gpu

ROWS, WIDTH, ROUNDS, REPLAYS = 2048, 4096, 6, 50  # sums whose few digits bfloat16 holds


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
        for step in range(REPLAYS):
            wanted = fill(step)
            graph.replay()
            check("replay", step, results, wanted)
            if step % 10 == 9:
                wanted = fill(step)
                check("between", step, steps(axis, parts, weight), wanted)
    graph.reset()
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_beside_products(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(__name__, ranks, tmp_path, timeout=200):
        assert found == {"copies": ranks == 2, "nccl": [], "copy engines": []}


def main() -> None:
    """One rank."""
    from strata.comm.launch import join_world

    with join_world("cuda", timeout_seconds=60) as world:
        axis = Mesh.of(world, {"tp": world.size}).axis("tp")
        copies = with_peer_copies(with_symmetric_memory(axis, world.device), world.device, 4, ROWS * WIDTH * 2)
        found: dict[str, Any] = {"copies": copies.copies is not None}
        for name, one in (("nccl", axis), ("copy engines", copies)):
            found[name] = wrong_of(one, world.device) + wrong_norms(one, world.device)
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
