"""The kernel of `gather_tables` against its reference, where tables are long, and in a recording that enters pages."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.state.gather_tables import gather_tables

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize(("sequences", "most_pages"), [(1, 1), (1, 256), (3, 1023), (7, 1025), (256, 2560), (5, 6400)])
def test_the_kernel_reads_and_enters_what_the_reference_does(sequences: int, most_pages: int, page_size: int) -> None:
    count = sequences + 3
    tables = torch.randint(10**6, (count, most_pages), dtype=torch.int32, device="cuda")
    counts = torch.randint(1, 9, (sequences,))
    tokens = int(counts.sum())
    buffer = torch.empty(3 * sequences + tokens + 2, dtype=torch.int32, device="cuda")[1:]  # at an odd address
    rows, offsets, lengths, slots = buffer.split([sequences, sequences + 1, sequences, tokens])
    rows.copy_(torch.randperm(count, device="cuda")[:sequences])
    offsets.copy_(torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    lengths.copy_(torch.randint(most_pages * page_size + 1, (sequences,)))
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
