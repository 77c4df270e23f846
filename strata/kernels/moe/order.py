"""Rows of a mixture's tokens, sorted by the expert that they go to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """Rows, one for each token and expert of it, sorted by expert, those of one in the order of tokens; some of a
    token's slots may have no row.

    source: [rows] which slot, counted token by token, each row is of. inverse: [tokens, per_token], which row a
    slot has, -1 for none. ends: [experts] int32, where the rows of each expert end.
    """

    source: Tensor
    inverse: Tensor
    ends: Tensor

    @staticmethod
    def of(chosen: Tensor, count: int, *, empty: bool = False) -> Order:
        """chosen: [tokens, per_token] below `count`. empty: whether it may be -1, for a slot without a row; the order
        then has to be told the number of rows (`with_rows`). Nothing waits for the device.
        """
        numbers = chosen.flatten()
        # Slots without a row come last.
        expert, source = (numbers.where(numbers >= 0, count) if empty else numbers).sort(stable=True)
        inverse = torch.empty_like(source).scatter_(0, source, torch.arange(len(source), device=source.device))
        if empty:
            inverse.masked_fill_(numbers < 0, -1)
        bounds = torch.arange(count, dtype=expert.dtype, device=expert.device)
        ends = torch.searchsorted(expert, bounds, right=True, out_int32=True)
        return Order(source, inverse.view(chosen.shape), ends)

    def with_rows(self, rows: int | None) -> Order:
        """The same of as many rows as there are, which only the device knew; None: every slot has one."""
        return replace(self, source=self.source[:rows])
