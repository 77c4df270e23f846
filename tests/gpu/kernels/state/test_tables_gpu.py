"""What steps read from the device: block tables that follow the host, the newest ids, and what a CUDA graph lends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.cache.block_tables import MAX_CHANGES, BlockTables
from strata.graph.cudagraph import non_owning_view
from strata.kernels.state.gather_tables import gather_tables, newest_tokens
from tests.gpu.tensors import captured

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize(("sequences", "page_limit"), [(1, 1), (1, 256), (3, 1023), (7, 1025), (256, 2560), (5, 6400)])
def test_the_kernel_reads_and_enters_what_the_reference_does(sequences: int, page_limit: int, page_size: int) -> None:
    count = sequences + 3
    tables = torch.randint(10**6, (count, page_limit), dtype=torch.int32, device="cuda")
    counts = torch.randint(1, 9, (sequences,))
    tokens = int(counts.sum())
    buffer = torch.empty(3 * sequences + tokens + 2, dtype=torch.int32, device="cuda")[1:]  # at an odd address
    rows, offsets, lengths, slots = buffer.split([sequences, sequences + 1, sequences, tokens])
    rows.copy_(torch.randperm(count, device="cuda")[:sequences])
    offsets.copy_(torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    lengths.copy_(torch.randint(page_limit * page_size + 1, (sequences,)))
    slots.copy_(torch.randint(10**6 * page_size, (tokens,)))
    lengths[0] = 0
    wanted_tables = tables.clone()
    wanted = gather_tables.reference(wanted_tables, rows, offsets, lengths, slots, page_size)
    found = gather_tables(tables, rows, offsets, lengths, slots, page_size)
    assert torch.equal(tables, wanted_tables)
    for sequence, length in enumerate(lengths.tolist()):  # past the last token nothing is promised
        pages = -(-length // page_size)
        assert torch.equal(found[sequence, :pages], wanted[sequence, :pages])


def test_recorded_steps_hand_their_pages_on() -> None:
    tables = torch.zeros((4, 300), dtype=torch.int32, device="cuda")
    rows, lengths, slots = inputs = torch.zeros(3, 2, dtype=torch.int32, device="cuda")
    offsets = torch.arange(3, dtype=torch.int32, device="cuda")
    gather_tables(tables, rows, offsets, lengths, slots, 16)
    tables.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gather_tables(tables, rows, offsets, lengths, slots, 16)
    wanted = torch.zeros(300, dtype=torch.int32)
    for position in range(0, 16 * 300, 7):
        page = 1 + position // 16
        inputs.copy_(torch.tensor([[2, 3], [position + 1, 0], [page * 16 + position % 16, -1]]))
        wanted[position // 16] = page
        graph.replay()
        assert torch.equal(found[0, :page].cpu(), wanted[:page])
        assert not found[1, 0]
    assert torch.equal(tables[2].cpu(), wanted)
    assert not tables[[0, 1, 3]].any()


@pytest.mark.parametrize("count", [1, 3, 255, 256, 257, 8192])
def test_the_kernel_reads_what_the_reference_reads(count: int) -> None:
    newest = torch.randint(-1, 1000, (300,), dtype=torch.int32, device="cuda")
    buffer = torch.randint(0, 1000, (2 * count + 1,), dtype=torch.int32, device="cuda")[1:]  # at an odd address
    tokens, sources = buffer[:count], buffer[count:].remainder(301).sub(1)
    assert torch.equal(newest_tokens(tokens, sources, newest), newest_tokens.reference(tokens, sources, newest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_non_owning_view_is_the_same_memory_and_does_not_keep_it(dtype: torch.dtype) -> None:
    owner = torch.randn(5, 33, device="cuda").to(dtype)
    lent = non_owning_view(owner)
    assert lent.data_ptr() == owner.data_ptr()
    assert torch.equal(lent, owner)
    owner.fill_(2)
    assert bool((lent == 2).all())
    held = torch.cuda.memory_allocated()
    del owner
    assert torch.cuda.memory_allocated() < held


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
    graph, found = captured(lambda: tables.on_device.index_select(0, rows))
    for value in range(1, 4):
        tables.update(3, 10 * value, [value] * 7)
        tables.update(0, 500, [value] * 12)
        tables.send()
        graph.replay()
        assert torch.equal(found.cpu(), torch.from_numpy(tables.rows[[3, 0, 5]]))
    rows.copy_(torch.tensor([1, 3, 3], dtype=torch.int32))
    graph.replay()
    assert torch.equal(found.cpu(), torch.from_numpy(tables.rows[[1, 3, 3]]))
