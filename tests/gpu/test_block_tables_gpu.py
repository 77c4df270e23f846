"""Block tables on CUDA: the device's side follows the host's in the order of the work it is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.cache.block_tables import MAX_CHANGES, BlockTables

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000


def test_the_device_follows_though_it_is_behind() -> None:
    device = torch.device("cuda")
    tables = BlockTables(20, 2 * MAX_CHANGES, device)
    rng = np.random.default_rng(0)
    rows = torch.arange(21, dtype=torch.int32, device=device)
    wanted, found = [], []
    for step in range(40):
        for slot in rng.permutation(20)[: rng.integers(1, 21)]:
            count = int(rng.choice([1, 1, 1, 2, 300, 2 * MAX_CHANGES - 3]))
            first = int(rng.integers(0, 2 * MAX_CHANGES - count + 1))
            tables.update(int(slot), first, rng.integers(0, 10**6, count).tolist())
        if step % 4 == 0:
            torch.cuda._sleep(CYCLES)
        tables.send()
        found.append(tables.on_device.index_select(0, rows))
        wanted.append(torch.from_numpy(tables.rows.copy()))
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine.cpu(), other)


def test_a_recording_reads_what_the_tables_hold_when_it_is_replayed() -> None:
    device = torch.device("cuda")
    tables = BlockTables(5, 512, device)
    rows = torch.tensor([3, 0, tables.padding], dtype=torch.int32, device=device)
    tables.on_device.index_select(0, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tables.on_device.index_select(0, rows)
    for value in range(1, 4):
        tables.update(3, 10 * value, [value] * 7)
        tables.update(0, 500, [value] * 12)
        tables.send()
        graph.replay()
        assert torch.equal(found.cpu(), torch.from_numpy(tables.rows[[3, 0, 5]]))
    rows.copy_(torch.tensor([1, 3, 3], dtype=torch.int32))
    graph.replay()
    assert torch.equal(found.cpu(), torch.from_numpy(tables.rows[[1, 3, 3]]))
