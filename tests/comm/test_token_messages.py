"""Tokens gathered over gloo, and their costs by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.comm.operations import Along
from strata.comm.token_messages import gather_keys_values, gather_tokens
from strata.hardware.roofline import Cost, Workload
from tests.parallel.ranks import run_ranks

WORKLOAD = Workload((2,), (2,))


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(12, dtype=torch.bfloat16).view(3, 2, 2).transpose(0, 1) + 100 * rank  # not contiguous


def on_ranks(world: World, folder: Path) -> list[Any]:
    axis = Mesh.of(world, {"cp": world.size}).axis("cp")
    x = rows_of(axis.index)
    keys, values = gather_keys_values.bind("cpu", deterministic=True)(x, axis, -x)
    assert keys.stride()[1:] == values.stride()[1:] == (2, 1)
    gather = gather_tokens.bind("cpu", deterministic=True)
    assert gather(x[:0], axis).shape == (0, 3, 2)
    return [found.float().tolist() for found in (gather(x, axis), keys, -values)]


def test_ranks_have_the_tokens_of_all(tmp_path: Path) -> None:
    wanted = torch.cat([rows_of(0), rows_of(1)]).float().tolist()
    assert run_ranks(on_ranks, 2, tmp_path) == [[wanted] * 3] * 2


def test_costs_by_hand() -> None:
    """24 bytes a rank, and twice that of keys and values, which are copied side by side."""
    x, along = torch.empty(2, 3, 2, dtype=torch.bfloat16, device="meta"), Along("cp", 4)
    assert gather_tokens.cost(x, along, workload=WORKLOAD) == Cost(read=24, written=96, messages=1, sent=72)
    pair = Cost(read=48 + 48, written=48 + 192, messages=1, sent=144)
    assert gather_keys_values.cost(x, along, x, workload=WORKLOAD) == pair
    assert gather_tokens.cost(x[:0], along, workload=WORKLOAD) == Cost()
    assert gather_tokens.meta(x, along).shape == (8, 3, 2)
    assert [found.shape for found in gather_keys_values.meta(x, along, x)] == [(8, 3, 2)] * 2


def test_one_rank_sends_nothing() -> None:
    x, alone = torch.zeros(2, 3, 2), Along("cp", 1)
    assert gather_tokens(x, alone) is x
    assert all(found is x for found in gather_keys_values(x, alone, x))
    assert gather_keys_values.cost(x, alone, x, workload=WORKLOAD) == Cost()
