"""Keys of prompts that are gathered lie where query chunks begin, with zeros behind each prompt."""

from __future__ import annotations

import random

import pytest
import torch

from strata.kernels.attention.prompt_keys import reference
from strata.kernels.attention.query_chunks import KEY_BLOCK, Rows, as_query_chunks, query_chunks
from strata.kernels.state.paged import PagedKV
from tests.kernels.attention.test_query_chunks import Step, random_step, tensors

HEADS, DIM, LONGEST = 2, 8, 12_800
ROWS = Rows(48, 32, HEADS * DIM, HEADS * DIM)


def pages_of(step: Step, page_size: int, dtype: torch.dtype = torch.float32) -> tuple[PagedKV, dict[str, torch.Tensor]]:
    """Random ones in a random order; what no sequence has is not finite."""
    given = tensors(step, len(step.new) + 2, sum(step.new), LONGEST // page_size, page_size)
    count = max(1, sum(-(-total // page_size) for total in step.totals))
    order = torch.randperm(count).int()
    keys, values = torch.full((2, count, page_size, HEADS, DIM), torch.nan, dtype=dtype)
    for sequence, total in enumerate(step.totals):
        used = -(-total // page_size)
        given["tables"][sequence, :used] = order[given["tables"][sequence, :used].long()]
        for pool in (keys, values):
            own = torch.full((used * page_size, HEADS, DIM), torch.nan, dtype=dtype)
            own[:total] = torch.randn(total, HEADS, DIM)
            pool[given["tables"][sequence, :used].long()] = own.unflatten(0, (used, page_size))
    lengths = given["lengths"]
    return PagedKV((keys,), (values,), given["tables"], lengths, lengths), given


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_each_prompt_has_its_keys_from_where_its_virtual_sequences_begin(page_size: int) -> None:
    for seed in range(12):
        step = random_step(random.Random(seed), 8, 6000)
        pages, given = pages_of(step, page_size)
        division = query_chunks(given["offsets"], given["lengths"], given["bounds"], ROWS)
        gathered = reference(pages, 0, as_query_chunks(division, ROWS), LONGEST)
        begin = 0
        for sequence in range(step.decodes, len(step.new)):
            total = step.totals[sequence]
            used = pages.tables[sequence, : -(-total // page_size)].long()
            for found, pool in zip(gathered, (pages.keys[0], pages.values[0]), strict=True):
                assert found[begin : begin + total].equal(pool[used].flatten(0, 1)[:total])
                assert not found[begin + total : begin + total + -total % KEY_BLOCK].any()
            begin += total + -total % KEY_BLOCK
