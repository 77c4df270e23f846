"""The tables that a decode step reads: those of its sequences, with the page of each new token entered for good."""

from __future__ import annotations

import torch

from strata.hardware.roofline import Workload
from strata.kernels.state.gather_tables import gather_tables


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_new_page_is_read_now_and_kept_and_padding_enters_nothing() -> None:
    tables = torch.tensor([[5, 2, 0], [7, 0, 0], [9, 1, 4], [0, 0, 0]], dtype=torch.int32)
    # Sequence 1 begins its second page, which is page 8 of the pool; sequence 2 goes on in its third.
    rows, offsets, lengths = _int32(2, 1, 3), _int32(0, 1, 2, 3), _int32(10, 5, 0)
    found = gather_tables(tables, rows, offsets, lengths, _int32(4 * 4 + 1, 8 * 4, -1), 4)
    assert found.tolist() == [[9, 1, 4], [7, 8, 0], [0, 0, 0]]
    assert tables.tolist() == [[5, 2, 0], [7, 8, 0], [9, 1, 4], [0, 0, 0]]
    assert found.dtype == torch.int32


def test_of_several_tokens_the_last_has_its_page_entered() -> None:
    tables = torch.tensor([[3, 0, 0], [6, 7, 0]], dtype=torch.int32)
    # Tokens 4 to 8 of one sequence, then one token of length 0 to which all padding belongs.
    slots = _int32(5 * 4, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 9 * 4, -1, -1)
    found = gather_tables(tables, _int32(0, 1), _int32(0, 5, 7), _int32(9, 0), slots, 4)
    assert found.tolist() == [[3, 0, 9], [6, 7, 0]]


def test_cost_counts_four_numbers_a_sequence_and_each_page_twice() -> None:
    tables = torch.empty((9, 100), dtype=torch.int32, device="meta")
    row = torch.empty(2, dtype=torch.int32, device="meta")
    cost = gather_tables.cost(tables, row, row, row, row, 16, workload=Workload((1, 1), (33, 16)))
    assert (cost.flops, cost.read, cost.written) == (0, 4 * 8 + 4 * (3 + 1), 4 * (3 + 1))
