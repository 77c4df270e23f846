"""Sums over gloo ranks in the order of a tree, whole and in pieces of their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.comm import operations
from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.comm.operations import pairwise_all_reduce
from tests.parallel.ranks import run_ranks


def part(rank: int) -> Tensor:
    """[7, 3], of magnitudes so far apart that the order of a sum shows in its last bits."""
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(rank)).mul(10.0**rank)


def on_ranks(world: World, folder: Path) -> dict[str, object]:
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    run = pairwise_all_reduce.bind("cpu", deterministic=True)
    x = part(world.rank)
    found: dict[str, object] = {"whole": run(x, axis).tolist(), "none": run(x[:0], axis).shape[0]}
    operations._GATHERED_BYTES = 2 * world.size * x[0].nbytes  # two rows at once, and one at last
    found["pieces"] = run(x, axis).tolist()
    assert torch.equal(x, part(world.rank)), "a collective must not write into its argument"
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_neighbours_are_added_first(ranks: int, tmp_path: Path) -> None:
    x = [part(rank) for rank in range(ranks)]
    expected = x[0] + x[1] if ranks == 2 else (x[0] + x[1]) + (x[2] + x[3])
    if ranks == 4:
        assert not torch.equal(expected, ((x[0] + x[1]) + x[2]) + x[3])
    for found in run_ranks(on_ranks, ranks, tmp_path):
        assert found == {"whole": expected.tolist(), "pieces": expected.tolist(), "none": 0}
