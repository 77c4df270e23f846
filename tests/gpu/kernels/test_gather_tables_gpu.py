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
    buffer = torch.empty(3 * sequences + 1, dtype=torch.int32, device="cuda")[1:]  # at an odd address
    rows, positions, slots = buffer.split(sequences)
    rows.copy_(torch.randperm(count, device="cuda")[:sequences])
    positions.copy_(torch.randint(most_pages * page_size, (sequences,)))
    slots.copy_(torch.randint(-1, 10**6 * page_size, (sequences,)))
    slots[0] = -1
    wanted_tables = tables.clone()
    wanted = gather_tables.reference(wanted_tables, rows, positions, slots, page_size)
    found = gather_tables(tables, rows, positions, slots, page_size)
    assert torch.equal(tables, wanted_tables)
    for sequence, position in enumerate(positions.tolist()):  # past the new token nothing is promised
        pages = position // page_size + 1
        assert torch.equal(found[sequence, :pages], wanted[sequence, :pages])


def test_recorded_steps_hand_their_pages_on() -> None:
    tables = torch.zeros((4, 300), dtype=torch.int32, device="cuda")
    inputs = torch.zeros(3, 2, dtype=torch.int32, device="cuda")
    gather_tables(tables, *inputs, 16)
    tables.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gather_tables(tables, *inputs, 16)
    wanted = torch.zeros(300, dtype=torch.int32)
    for position in range(0, 16 * 300, 7):
        page = 1 + position // 16
        inputs.copy_(torch.tensor([[2, 3], [position, 0], [page * 16 + position % 16, -1]]))
        wanted[position // 16] = page
        graph.replay()
        assert torch.equal(found[0, :page].cpu(), wanted[:page])
        assert not found[1, 0]
    assert torch.equal(tables[2].cpu(), wanted)
    assert not tables[[0, 1, 3]].any()
