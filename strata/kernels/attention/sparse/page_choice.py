"""Which pages of its keys a decoding sequence attends to: those that could have the largest scores.

Quest (Tang et al. 2024, arXiv:2406.10774): of each page the smallest and the largest element of its keys in each column
are kept, which bound the product of a query with any of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from strata.kernels.state.paged import PagedKV


class PageChoice(NamedTuple):
    """pages: to which each KV head of a sequence with one new token attends, its newest included, at least 2; shorter
    sequences see all keys."""

    pages: int


def write_bounds(pages: PagedKV, offsets: Tensor, layer: int) -> None:
    """Find the bounds of all pages into which this batch's keys have been written, from all keys that they hold."""
    pool, bounds, size = pages.keys[layer], pages.bounds[layer], pages.page_size
    lengths = pages.lengths.tolist()
    for sequence, (first, last) in enumerate(pairwise(offsets.tolist())):
        total, new = lengths[sequence], last - first
        if total < new:
            continue
        for at in range((total - new) // size, -(-total // size)):
            page = int(pages.tables[sequence, at])
            bounds[page] = torch.stack(pool[page, : total - at * size].aminmax(dim=0))


def page_scores(q: Tensor, bounds: Tensor) -> Tensor:
    """The most that a key of each page can score with any of the queries, [pages].

    q: [heads, head_dim], of one token, of the heads that share a KV head; bounds: [pages, 2, head_dim], the smallest
    and the largest.
    """
    products = q[:, None, None] * bounds
    return products.amax(2).sum(-1).amax(0)


def chosen_pages(scores: Tensor, count: int) -> Tensor:
    """The places of `count` pages, ascending: the newest, which is the last, and those of the largest scores; of equal
    ones the earlier."""
    found = scores[:-1].sort(descending=True, stable=True).indices[: count - 1]
    return torch.cat((found.sort().values, found.new_tensor([len(scores) - 1])))
