"""Rows on their way to experts and back on several GPUs: every implementation brings what the reference does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strata.comm.experts.rows import combine_rows, dispatch_rows
from strata.comm.mesh import Axis, Mesh
from strata.comm.symmetric import with_symmetric_memory
from tests.gpu.ranks import found_by_ranks

pytestmark = pytest.mark.gpu


def rows_of(rank: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1000 * rows + rank)
    return torch.randn(rows, 2048, generator=generator, device=device).to(dtype)


def wrong_messages(axis: Axis, device: torch.device) -> list[str]:
    """Which results are not those of all ranks' rows."""
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
    for found in found_by_ranks(__name__, ranks, tmp_path, timeout=200):
        assert found == []


def main() -> None:
    """One rank."""
    from strata.comm.launch import join_world

    with join_world("cuda", timeout_seconds=60) as world:
        axis = with_symmetric_memory(Mesh.of(world, {"tp": world.size}).axis("tp"), world.device)
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(wrong_messages(axis, world.device)))


if __name__ == "__main__":
    main()
