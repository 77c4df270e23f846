"""Products whose programs send what ranks add up: to the bit what stored products and their messages give, replayed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import all_gather, all_reduce
from strata.comm.reduced_norm import linear_all_reduce_add_rms_norm
from strata.comm.symmetric import with_symmetric_memory
from strata.kernels.linear.linear import linear
from strata.kernels.linear.silu_mul import linear_silu_mul
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


def wrong_replays(axis: Axis, device: torch.device) -> list[int]:
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


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_is_sent_has_the_bits_of_what_is_stored(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(__name__, ranks, tmp_path, timeout=200):
        assert found == {"symmetric": True, "products": [], "replays": [0, 0]}


def main() -> None:
    """One rank."""
    from strata.comm.launch import join_world

    with join_world("cuda", timeout_seconds=60) as world:
        axis = with_symmetric_memory(Mesh.of(world, {"tp": world.size}).axis("tp"), world.device)
        found: dict[str, Any] = {"symmetric": axis.symmetric is not None}
        found |= {"products": wrong_products(axis, world.device), "replays": wrong_replays(axis, world.device)}
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
