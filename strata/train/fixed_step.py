"""A step over batches of one shape, as pretraining has them: every token counts, and the whole step can be recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.graph.cudagraph import CudaGraphs
from strata.kernels.loss_grad import cross_entropy_gradients
from strata.models.batch import Batch
from strata.models.layers import CausalLM
from strata.train.compile import TrainingGraph
from strata.train.fused_adamw import FusedAdamW
from strata.train.step import head_weight


class FixedStep:
    """Forward, backward and update over `sequences` sequences of `length` tokens each, on the model's device."""

    def __init__(
        self,
        model: CausalLM,
        optimizer: FusedAdamW,
        sequences: int,
        length: int,
        *,
        logits_bytes: int,
        recorded: bool,
        graph: bool = True,
    ) -> None:
        """logits_bytes: what the logits that exist at once may take. recorded: the second step and those after it are
        replays of one CUDA graph."""
        self._model, self._optimizer, self._logits_bytes = model, optimizer, logits_bytes
        self._graph = TrainingGraph(model) if graph else None
        self._recordings = CudaGraphs() if recorded else None
        self._is_recorded = False
        device, count = head_weight(model).device, sequences * length
        self._batch = Batch(
            tokens=torch.zeros(count, dtype=torch.int32, device=device),
            positions=torch.arange(length, dtype=torch.int32, device=device).repeat(sequences),
            offsets=torch.arange(0, count + 1, length, dtype=torch.int32, device=device),
            longest=length,
        )
        self._targets = torch.zeros(count, dtype=torch.int64, device=device)
        self._scale = torch.full((), 1 / count, device=device)
        self._loss, self._norm = torch.zeros(2, device=device).unbind()

    def __call__(self, tokens: Tensor, targets: Tensor, learning_rate: float) -> tuple[Tensor, Tensor]:
        """One step. tokens, targets: [sequences * length] integers on any device, -100 where a target does not count.

        Returns the sum of the losses over the number of tokens, and the gradient's norm before clipping, [] float32 on
        the device; does not wait for them. A mean needs every target to count.
        """
        self._batch.tokens.copy_(tokens, non_blocking=True)
        self._targets.copy_(targets, non_blocking=True)
        self._optimizer.begin(learning_rate)
        if self._recordings is None:
            self._work()
        elif self._is_recorded:
            self._recordings.replay("step")
        else:
            self._recordings.record("step", self._work)  # which runs it once before
            self._is_recorded = True
        return self._loss.clone(), self._norm.clone()

    def _work(self) -> None:
        run = self._model if self._graph is None else self._graph
        hidden = run(self._batch)
        head = head_weight(self._model)
        loss, of_hidden, head.grad = cross_entropy_gradients(
            hidden.detach(), head.detach(), self._targets, self._scale, self._logits_bytes
        )
        hidden.backward(of_hidden)  # adds to the head's gradient where it is the embedding too
        if self._graph is not None:
            self._graph.hand_out_gradients()
        self._norm.copy_(self._optimizer.update())
        self._loss.copy_(loss)
        if self._graph is not None:
            self._graph.clear_gradients()
