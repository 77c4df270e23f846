"""What a training step minimizes: a loss, and what it needs of a pack on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from strata.parallel.loss import Head, Loss, MicroBatch
from strata.train.data.pack import PackedBatch


@dataclass(frozen=True)
class Columns:
    """What a loss needs of a pack besides its targets, by name: arrays [targets, ...], and others [documents, ...]."""

    targets: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    documents: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class Objective(Loss, Protocol):
    """The mean of a loss over some things of the whole step: tokens, documents, pairs. Each pack has whatever number of
    them.
    """

    def count(self, packed: PackedBatch) -> int:
        """How many of those things are in a pack; 0 in one whose documents count nothing."""

    def columns(self, packed: PackedBatch) -> Columns | None:
        """None: the targets suffice. Alike in names and types for every pack."""


class NextToken:
    """Cross-entropy of the counted tokens: all of a text in pretraining, the assistant's turns in fine-tuning."""

    metrics: tuple[str, ...] = ()
    sums_cross_entropy: bool = True

    def count(self, packed: PackedBatch) -> int:
        return len(packed.targets)

    def columns(self, packed: PackedBatch) -> Columns | None:
        return None

    def __call__(self, hidden: Tensor, head: Head, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return head.summed_cross_entropy(hidden, batch.targets, batch.scale), {}
