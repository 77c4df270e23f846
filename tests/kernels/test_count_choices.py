"""Counting which experts are chosen, against counts by hand."""

from __future__ import annotations

import torch

from strata.hardware.roofline import Cost, Workload
from strata.kernels.moe.count import count_choices
from strata.kernels.state.kept_keys import ELSEWHERE


def test_choices_of_a_layer_are_added_and_padding_is_not() -> None:
    chosen = torch.tensor([[2, 0], [2, 1], [0, 3], [2, 3]])
    slot_mapping = torch.tensor([7, 9, -1, 4], dtype=torch.int32)
    totals = torch.arange(8).view(2, 4)
    for run in (count_choices.reference, count_choices.bind("cpu"), count_choices.bind("cpu", deterministic=True)):
        found = run(chosen, slot_mapping, totals, 1)
        assert found is chosen
    assert totals.tolist() == [[0, 1, 2, 3], [4 + 3, 5 + 3, 6 + 9, 7 + 3]]


def test_tokens_that_other_ranks_keep_are_counted_as_those_kept_here() -> None:
    """All ranks compute all tokens, and each has to know how often an expert is chosen, whoever keeps their keys."""
    slot_mapping = torch.tensor([ELSEWHERE, 3, -1, ELSEWHERE], dtype=torch.int32)
    for run in (count_choices.reference, count_choices.bind("cpu")):
        totals = torch.zeros(1, 4, dtype=torch.int64)
        run(torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]]), slot_mapping, totals, 0)
        assert totals.tolist() == [[3, 1, 1, 1]]


def test_no_tokens_add_nothing() -> None:
    totals = torch.zeros(1, 4, dtype=torch.int64)
    count_choices(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int32), totals, 0)
    assert not totals.any()


def test_cost() -> None:
    chosen, slot_mapping = torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    totals = torch.zeros(3, 8, dtype=torch.int64)
    cost = count_choices.cost(chosen, slot_mapping, totals, 0, workload=Workload((6,), (6,)))
    assert cost == Cost(12, 96 + 24 + 96, 96)
    assert count_choices.meta(chosen, slot_mapping, totals, 0).shape == (6, 2)
