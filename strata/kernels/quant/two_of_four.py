"""2:4 sparsity: of each four columns in a row at most two are not zero (Mishra et al. 2021, arXiv 2104.08378).

Compressed are two values of each four columns, and for eight columns a byte that says where their four values stand:
two bits each, the first value's lowest. That is the metadata of sparse tensor cores before any hardware reorders it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FOUR, KEPT = 4, 2
# Columns whose places fill a byte.
BYTE_COLUMNS = 8


def is_two_of_four(weight: Tensor) -> bool:
    """Whether a weight [..., width] is 2:4 sparse; never if four do not divide the width."""
    if weight.shape[-1] % FOUR:
        return False
    return bool((_fours(weight) != 0).sum(-1).le(KEPT).all())


def smallest_two_of_four(scores: Tensor) -> Tensor:
    """True at the two least of each four scores [..., width]; of equal ones at the first."""
    fours = _fours(scores)
    least = fours.argsort(dim=-1, stable=True)[..., : FOUR - KEPT]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, least, True).flatten(-2)


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [..., width], 2:4 sparse, as its values [..., width / 2] and their places [..., width / 8] in uint8.

    Both values are in the order of their columns; where fewer than two are not zero, zeros fill up. Raises ValueError
    if it is not 2:4 sparse, or if eight do not divide the width.
    """
    width = weight.shape[-1]
    if width % BYTE_COLUMNS:
        raise ValueError(f"its width {width} is not a multiple of {BYTE_COLUMNS}, whose places fill a byte")
    fours = _fours(weight)
    present = fours != 0
    if (most := int(present.sum(-1).max())) > KEPT:
        raise ValueError(f"{most} of four weights in a row are not zero, and 2:4 sparsity leaves {KEPT}")
    # Those that are not zero come first, in the order of their columns; then the two that are kept are put in order.
    places = (~present).to(torch.uint8).argsort(dim=-1, stable=True)[..., :KEPT].sort(-1).values
    values = fours.gather(-1, places).flatten(-2)
    four = places.to(torch.uint8).unflatten(-2, (-1, 2)).flatten(-2)  # the places of eight columns: four
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=weight.device)
    return values, (four << shifts).sum(-1, dtype=torch.uint8)


def expand(values: Tensor, places: Tensor) -> Tensor:
    """The weight [..., width] of which `compress` made these."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=places.device)
    columns = ((places[..., None] >> shifts) & 3).unflatten(-1, (2, KEPT)).flatten(-3, -2)
    pairs = values.unflatten(-1, (-1, KEPT))
    fours = torch.zeros((*pairs.shape[:-1], FOUR), dtype=values.dtype, device=values.device)
    return fours.scatter_(-1, columns.long(), pairs).flatten(-2)


def _fours(weight: Tensor) -> Tensor:
    fours: Tensor = weight.unflatten(-1, (-1, FOUR))
    return fours
