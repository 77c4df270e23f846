"""Sums of neighbours, then of neighbouring sums, and so on: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).

Whoever has an aligned half or quarter of the numbers has a whole branch of that tree. So a sum has the same bits
whether one rank adds up all numbers or several add up some each and then add their sums.
"""

from __future__ import annotations

from torch import Tensor


def pairwise_sum(parts: list[Tensor]) -> Tensor:
    """What has no neighbour waits for the next round."""
    while len(parts) > 1:
        sums = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = sums + parts[2 * len(sums) :]
    return parts[0]
