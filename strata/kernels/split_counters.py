"""Counters by which the last of several programs learns that the others have finished, and takes up their results."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MAX_COUNTERS = 1 << 16


@cache
def split_counters(device: torch.device) -> Tensor:
    """[MAX_COUNTERS] int32 zeros on a device, always the same.

    A kernel adds to a counter as each of its programs arrives, and its last program sets it back to 0. So they are
    zero between kernels, as long as kernels that use them run one after the other, as those of a step do.
    """
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
