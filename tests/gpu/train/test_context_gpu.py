"""Ring attention over NCCL in bfloat16 against one process in float64: results and gradients of each rank's tokens."""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from strata.comm.launch import World, join_world
from strata.comm.mesh import Mesh
from strata.kernels.attention.partial import Part, partial_attention, partial_attention_gradients
from strata.parallel.context_ring import RingSteps, ring_attention
from strata.parallel.zigzag import Zigzag
from tests.gpu.ranks import found_by_ranks

pytestmark = pytest.mark.gpu

# Documents that no number of ranks divides, one shorter than the ranks; one, and two, whose chunks are of one length.
BATCHES = ((1900, 1, 300, 37), (4096,), (2048, 2048))
HEADS, KV_HEADS, WIDTH = 8, 2, 64


def errors(world: World, lengths: tuple[int, ...]) -> dict[str, float]:
    """Relative, of this rank's rows."""
    axis, device = Mesh.of(world, {"cp": world.size}).axis("cp"), world.device
    draw = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *given, slope = (torch.randn(*shape, generator=draw).bfloat16().to(device) for shape in shapes)
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    whole = Part(offsets, offsets, max(lengths), max(lengths), True)
    wide, scale = [one.double() for one in given], WIDTH**-0.5
    out, sums = partial_attention.reference(*wide, whole, scale)
    wanted = out, *partial_attention_gradients.reference(slope.double(), *wide, out, sums, whole, scale)

    division = Zigzag(lengths, world.size)
    rows = torch.tensor(division.rows(axis.index), device=device)
    leaves = [one[rows].requires_grad_() for one in given]
    mixed = ring_attention(*leaves, RingSteps(division, axis.index, device), axis, scale)
    mixed.backward(slope[rows])
    found = mixed.detach(), *(leaf.grad for leaf in leaves)
    return {
        f"{name} of {lengths}": ((mine.double() - exact[rows]).norm() / exact[rows].norm()).item()
        for name, mine, exact in zip(("out", "q", "k", "v"), found, wanted, strict=True)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_equals_one_process(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(__name__, ranks, tmp_path, timeout=200):
        assert len(found) == 4 * len(BATCHES)
        assert {name: error for name, error in found.items() if not error < 1e-2} == {}


def main() -> None:
    """One rank."""
    with join_world("cuda", timeout_seconds=120) as world:
        found = {name: error for lengths in BATCHES for name, error in errors(world, lengths).items()}
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
