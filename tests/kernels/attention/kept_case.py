"""Sequences of which a rank keeps some keys and values in pages, and what all ranks have found together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from strata.kernels.attention.spec import Sequences
from strata.kernels.state.kept_keys import KeptKeys
from tests.kernels.attention.test_attention import Case

# Of the first two, the ranks behind the first keep nothing that some queries, or any, see.
LENGTHS, NEW = [2, 1, 40, 17, 37], [2, 1, 1, 17, 20]


def batch_of(case: Case, new: list[int], kept: KeptKeys) -> tuple[Any, ...]:
    """Arguments of `kept_attention` but the last two; the rest of the pools is not a number."""
    own = [[one[kept.rank :: kept.ranks] for one in of_all] for of_all in (case.k, case.v)]
    counts = [len(one) for one in own[0]]
    pages = Case(case.q, *own).batch([0] * len(counts), counts)[3].pages
    totals = [len(q) for q in case.q]
    q, k, v = (
        torch.cat([one[len(one) - count :] for one, count in zip(of_all, new, strict=True)])
        for of_all in (case.q, case.k, case.v)
    )
    pages = replace(pages, lengths=torch.tensor(totals, dtype=torch.int32))
    return q, k, v, Sequences(torch.tensor([0, *new]).cumsum(0).int(), max(new), pages)
