"""What lies behind the last tokens of prompts is cleared, and nothing else is touched."""

from __future__ import annotations

import torch

from strata.kernels.state.clear_page_ends import clear_page_ends
from tests.kernels.attention.divisions import Step, tensors


def test_only_the_slots_behind_prompts_are_cleared() -> None:
    page_size = 16
    step = Step((5, 0, 3, 16, 0), (1, 1, 20, 16, 31), 2)
    given = tensors(step, 8, 100, 8, page_size)
    keys, values = (torch.full((3, 40, page_size, 2, 4), torch.nan) for _ in range(2))
    found = clear_page_ends(keys, values, given["tables"], given["lengths"], given["bounds"], 16)
    assert found is given["tables"]
    cleared = torch.zeros(40, page_size, dtype=torch.bool)
    page = 0
    for sequence, total in enumerate(step.totals):
        page += -(-total // page_size)
        if sequence >= step.decodes and total % page_size:
            cleared[page - 1, total % page_size :] = True
    for pool in (keys, values):
        assert not pool[:, cleared].any()
        assert pool[:, ~cleared].isnan().all()
