"""Scores and their ids as whole numbers in the order of likelihood, so that the best of parts is the largest number.

A key holds the score in its upper half, as the integer that has the order of float32, and in its lower half all ones
less the id: of two equal scores the lower id has the larger key.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Less than the key of any score.
NO_KEY = -(2**63)
_LOW = 0xFFFFFFFF


def score_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """Keys int64 of scores of any float dtype and the ids that they belong to, of a shape that broadcasts.

    NaN counts as infinity, so that a row that has one knows it by its largest key; -0 and 0 are equal.
    """
    bits = scores.float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).add_(0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.long() << 32) + (_LOW - ids.long())


def key_scores(keys: Tensor) -> Tensor:
    """The scores float32 of keys; NaN of `NO_KEY`."""
    order = (keys >> 32).int()
    return torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32)


def key_ids(keys: Tensor) -> Tensor:
    """The ids int32 of keys; -1 of `NO_KEY`."""
    return (_LOW - (keys & _LOW)).int()
