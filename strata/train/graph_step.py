"""A training step over the merged graph; steps over batches of one fixed shape are recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from strata.graph.cudagraph import CudaGraphs
from strata.kernels.loss import IGNORED
from strata.kernels.loss_grad import cross_entropy_gradients
from strata.models.batch import Batch
from strata.models.layers import CausalLM
from strata.train.compile import TrainingGraph
from strata.train.fused_adamw import FusedAdamW
from strata.train.pack import PackedBatch
from strata.train.step import head_weight

# What the logits that exist at once may take: all of 16384 tokens of a vocabulary of 128256 in bfloat16.
LOGITS_BYTES = 5 * 2**30


class GraphStep:
    """Forward and backward over packed batches, then the update. On a GPU, steps that recur in shape are recorded.

    A shape recurs if two steps in a row are one batch each of equally many sequences of one same length. Everything
    else runs through the same graph without a recording.
    """

    def __init__(
        self, model: CausalLM, optimizer: FusedAdamW, precision: str = "bf16", recompute: str = "none"
    ) -> None:
        """precision, recompute: as `TrainingGraph` takes them."""
        self._model, self._optimizer = model, optimizer
        self._graph = TrainingGraph(model, precision, recompute)
        self._device = head_weight(model).device
        self._before: tuple[int, int] | None = None
        self._fixed: FixedStep | None = None

    def __call__(self, batches: Sequence[PackedBatch], learning_rate: float) -> tuple[Tensor, Tensor]:
        """One step. Returns loss (mean over the counted tokens) and gradient norm before clipping, [] float32 on the
        device; does not wait for them."""
        shape, before = _fixed_shape(batches), self._before
        self._before = shape
        self._optimizer.begin(learning_rate)
        if shape is None or shape != before or self._device.type != "cuda":
            return self._run(batches)
        if self._fixed is None or self._fixed.shape != shape:
            self._fixed = None
            torch.cuda.empty_cache()  # a recording has memory of its own
            self._fixed = FixedStep(shape, self._device, self._whole)
        return self._fixed(batches[0])

    def _run(self, batches: Sequence[PackedBatch]) -> tuple[Tensor, Tensor]:
        counted = sum(len(batch.targets) for batch in batches)
        scale = torch.full((), 1 / max(counted, 1), device=self._device)
        loss = torch.zeros((), device=self._device)
        for packed in batches:
            batch, rows, targets = packed.to(self._device)
            loss += self._backward(batch, rows, targets, scale)
            if len(batches) > 1:
                self._optimizer.accumulate()
                self._graph.clear_gradients()
        return loss, self._update()

    def _whole(self, batch: Batch, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The step over one batch with a target for every token, -100 where it does not count."""
        loss = self._backward(batch, None, targets, scale)
        return loss, self._update()

    def _backward(self, batch: Batch, rows: Tensor | None, targets: Tensor, scale: Tensor) -> Tensor:
        """`scale` times the sum of the losses of `rows` (all if None), and the gradients of every parameter."""
        hidden = self._graph(batch)
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        head = head_weight(self._model)
        loss: Tensor
        loss, of_hidden, head.grad = cross_entropy_gradients(
            hidden.detach(), head.detach(), targets, scale, LOGITS_BYTES
        )
        hidden.backward(of_hidden)  # adds to the head's gradient where it is the embedding too
        self._graph.hand_out_gradients()
        return loss

    def _update(self) -> Tensor:
        norm = self._optimizer.update()
        self._graph.clear_gradients()
        return norm


class FixedStep:
    """`work` over one batch of `shape` = (sequences, tokens of each), recorded at the first call and replayed after.

    work: Batch, targets [tokens] (-100 where none counts) and scale [] to loss and norm, [] each.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        work: Callable[[Batch, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        sequences, length = shape
        count = sequences * length
        self.shape, self._work = shape, work
        self._batch = Batch(
            tokens=torch.zeros(count, dtype=torch.int32, device=device),
            positions=torch.arange(length, dtype=torch.int32, device=device).repeat(sequences),
            offsets=torch.arange(0, count + 1, length, dtype=torch.int32, device=device),
            longest=length,
        )
        self._targets = torch.zeros(count, dtype=torch.int64, device=device)
        self._scale, self._loss, self._norm = torch.zeros(3, device=device).unbind()
        self._recording = CudaGraphs()
        self._recorded = False

    def __call__(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Loss and norm of the step over `packed`, which has the shape of this one."""
        targets = np.full(len(packed.tokens), IGNORED, dtype=np.int64)
        targets[packed.rows] = packed.targets
        self._batch.tokens.copy_(torch.from_numpy(packed.tokens).pin_memory(), non_blocking=True)
        self._targets.copy_(torch.from_numpy(targets).pin_memory(), non_blocking=True)
        self._scale.fill_(1 / max(len(packed.targets), 1))
        if self._recorded:
            self._recording.replay("step")
        else:
            self._recording.record("step", self._step)  # which runs it once before
            self._recorded = True
        return self._loss.clone(), self._norm.clone()

    def _step(self) -> None:
        loss, norm = self._work(self._batch, self._targets, self._scale)
        self._loss.copy_(loss)
        self._norm.copy_(norm)


def _fixed_shape(batches: Sequence[PackedBatch]) -> tuple[int, int] | None:
    """Sequences and tokens of each, if the step is one batch of sequences of one length."""
    if len(batches) != 1:
        return None
    lengths = batches[0].lengths
    return (len(lengths), int(lengths[0])) if (lengths == lengths[0]).all() else None
