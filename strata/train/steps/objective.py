"""What a step minimizes: the mean, over tokens or over pairs, of a loss that each pack has its share of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from strata.kernels.loss.loss import linear_cross_entropy
from strata.models.layers import CausalLM
from strata.train.data.pack import PackedBatch
from strata.train.steps.passes import head_weight


class Objective(Protocol):
    """The loss of one pack, as a sum, so that packs and ranks can be added up whatever they hold.

    metrics: the names of the further sums.
    """

    metrics: tuple[str, ...]

    def count(self, packed: PackedBatch) -> int:
        """Of how many things the sum is."""

    def __call__(self, model: CausalLM, packed: PackedBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The sum, [] with its gradient, and by name further sums over the same things, for the log. The pack has some
        of those things.
        """


class NextToken:
    """Cross-entropy of the counted tokens: all of a text in pretraining, the assistant's turns in fine-tuning."""

    metrics: tuple[str, ...] = ()

    def count(self, packed: PackedBatch) -> int:
        return len(packed.targets)

    def __call__(self, model: CausalLM, packed: PackedBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        head = head_weight(model)
        batch, rows, targets = packed.to(head.device)
        total: Tensor = linear_cross_entropy(model(batch).index_select(0, rows), head, targets).sum()
        return total, {}
