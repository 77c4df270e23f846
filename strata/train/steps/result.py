"""What a training loop sees of a step, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from strata.train.checkpoints.state import StateShard
from strata.train.data.pack import PackedBatch


@dataclass(frozen=True)
class StepResult:
    """Tensors on the device that nobody has waited for yet, alike on all ranks.

    loss: [] the mean over the counted tokens of the whole step, of all ranks and packs. norm: [] of the whole gradient
    before clipping; a step whose norm is not finite changes nothing. metrics: by name, [] each.
    """

    loss: Tensor
    norm: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Stepper(Protocol):
    """Trains a model step by step. All ranks call the methods alike."""

    def __call__(self, batches: Sequence[PackedBatch], rate: float) -> StepResult:
        """One step. batches: this rank's packs, as many on every rank, alike along "cp", "tp" and "pp"."""

    def measured(self, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
        """What a step would say of these packs, by forward passes alone: nothing that a step changes changes. Call
        `sync_weights` before the first of several. batches: as for a step, but some of them may count nothing.

        Returns, alike on all ranks, [] each: "loss" and the objective's metrics, means over what counts, and "counted",
        how much that is; 0 leaves means of 0.
        """

    def state_shards(self) -> list[StateShard]:
        """What a checkpoint stores of this rank: the live memory of masters and optimizer state."""

    def restored(self, steps: int) -> None:
        """Go on after `steps` steps from shards that were filled in place."""

    def sync_weights(self) -> None:
        """Let the model compute with the weights of the last step, for whatever calls it outside of a step."""
