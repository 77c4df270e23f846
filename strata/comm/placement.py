"""How the ranks of an axis hold one parameter. Training cuts models by it, and serving rewrites their graphs."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Placement(Enum):
    """How the ranks of a tensor-parallel axis hold a parameter, and where its gradient comes from.

    COLUMN: rows of [outputs, inputs] or of a bias are divided; the input is whole, the output a part (Shoeybi et al.
        2019).
    STACKED: as COLUMN, of rows that stand in several stacks, each divided by itself.
    ROW: columns of [outputs, inputs] are divided; the input is a part, the output a sum over the ranks.
    VOCABULARY: rows are divided, by token ids.
    PER_TOKEN: held whole and applied to each token: with sequence parallelism a rank sees a part of the tokens
        (Korthikanti et al. 2022), so its gradient is a part of the sum; without, it is complete.
    PER_HEAD: held whole and applied to each head: a rank sees its own heads, so its gradient is a part of the sum.
    DIVIDED_NORM: of a norm over rows that the ranks divide as COLUMN does: its elements are divided, and the scale of a
        row follows from the columns of all ranks.
    EXPERT: divided along the expert axis by the first dimension. Along the tensor axis training holds them whole;
        serving divides each expert's width, or gives each rank experts of its own (`ExpertSlots`).
    """

    COLUMN = "column"
    STACKED = "stacked"
    ROW = "row"
    VOCABULARY = "vocabulary"
    PER_TOKEN = "per token"
    PER_HEAD = "per head"
    DIVIDED_NORM = "divided norm"
    EXPERT = "expert"

    @property
    def divided_dim(self) -> int | None:
        """The dimension that the tensor axis divides; None for a parameter that each rank holds whole."""
        if self in (Placement.COLUMN, Placement.STACKED, Placement.VOCABULARY, Placement.DIVIDED_NORM):
            return 0
        return 1 if self is Placement.ROW else None

    def gradient_is_partial(self, sequence_parallel: bool) -> bool:
        """Whether the gradient is whole only after a sum over the tensor axis."""
        return self is Placement.PER_HEAD or (sequence_parallel and self in (Placement.PER_TOKEN, Placement.EXPERT))


class ExpertSlots(NamedTuple):
    """Of the `total` places for experts that all ranks have together, a rank has those from `first` on."""

    first: int
    total: int
