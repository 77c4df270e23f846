"""Messages between neighbouring stages: what arrives over gloo, and costs by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.comm.operations import Along, receive_previous, send_next
from strata.hardware.roofline import Cost, Workload
from tests.parallel.ranks import run_ranks

WORKLOAD = Workload((3,), (3,))


def on_ranks(world: World, folder: Path) -> list[Any]:
    """Two messages from the first rank to the last, each rank adding its number to them on the way."""
    axis = Mesh.of(world, {"pp": world.size}).axis("pp")
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.zeros(3, dtype=torch.int32)
        x = torch.arange(12, dtype=dtype).view(4, 3).T  # not contiguous
        if axis.index:
            x = receive_previous.bind("cpu", deterministic=True)(rows, axis, 4, dtype)
            assert (x.shape, x.dtype) == ((3, 4), dtype)
        x = x + axis.index
        if axis.index + 1 < axis.size:
            assert send_next.bind("cpu", deterministic=True)(x, axis) is x
        found.append(x.float().tolist())
    return found


def test_what_a_stage_sends_the_next_receives(tmp_path: Path) -> None:
    sent = torch.arange(12.0).view(4, 3).T
    for rank, found in enumerate(run_ranks(on_ranks, 3, tmp_path)):
        assert found == [(sent + sum(range(rank + 1))).tolist()] * 2


def test_costs_by_hand() -> None:
    """12 numbers of 2 bytes, counted where they are sent."""
    x, along = torch.empty(3, 4, dtype=torch.bfloat16, device="meta"), Along("pp", 4)
    rows = torch.empty(3, dtype=torch.int32, device="meta")
    assert send_next.cost(x, along, workload=WORKLOAD) == Cost(read=24, messages=1, sent=24)
    assert receive_previous.cost(rows, along, 4, torch.bfloat16, workload=WORKLOAD) == Cost(written=24)
    assert receive_previous.meta(rows, along, 4, torch.bfloat16).shape == (3, 4)


def test_the_ends_have_no_neighbour() -> None:
    rows = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="rank 1 is the last of 2 along 'pp': none comes after it"):
        send_next(torch.zeros(3, 4), Axis("pp", 2, 1, (0, 1), None))
    with pytest.raises(ValueError, match="rank 0 is the first along 'pp': none comes before it"):
        receive_previous(rows, Axis("pp", 2, 0, (0, 1), None), 4, torch.float32)
