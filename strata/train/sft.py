"""Cross-entropy on tokenized data: all of a text in pretraining, the assistant's turns in fine-tuning."""

from __future__ import annotations

from torch import Tensor

from strata.models.layers import CausalLM
from strata.train.data.loader import Step
from strata.train.optim import Optimizer
from strata.train.step import accumulate_gradients


class SftGradients:
    """The gradient of the mean loss over all counted tokens of a step, however they are packed."""

    def __init__(self, model: CausalLM, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def __call__(self, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward of every batch. Returns the loss [] float32, and nothing more for the log."""
        return accumulate_gradients(self._model, self._optimizer, step.batches), {}
