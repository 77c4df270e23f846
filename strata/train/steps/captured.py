"""A step over batches of one fixed shape: captured once as CUDA graphs, messages included, and replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.comm.collectives import start_all_reduce
from strata.comm.mesh import Axis
from strata.graph.cudagraph import CudaGraphs
from strata.models.batch import Batch
from strata.parallel.loss import MicroBatch
from strata.train.data.pack import PackedBatch
from strata.train.steps.micro_batch import of_whole, whole_arrays
from strata.train.steps.objective import Objective

Shape = tuple[int, int, int]  # packs, sequences of each, tokens of each of those
# Micro-batches of their scale, [].
MakeBatches = Callable[[Tensor], Sequence[MicroBatch]]


class CapturedStep:
    """The passes of a step as one CUDA graph and its update as another, so that something may happen between them."""

    def __init__(
        self,
        shape: Shape,
        objective: Objective,
        context: Axis,
        device: torch.device,
        passes: Callable[[MakeBatches, Tensor], tuple[Tensor, Tensor, Tensor]],
        update: Callable[[Tensor], None],
        free_gradients: Callable[[], None],
    ) -> None:
        """passes: batches and this rank's count of what the loss is a mean of [] to `shares` of all ranks
        [1 + metrics], norm and the count of all ranks, [] each; run again without an update, they give the same.
        update: takes the norm. free_gradients: the gradients that passes left. context: of one rank.
        """
        packs, sequences, length = shape
        count = sequences * length
        self.shape, self._passes, self._update, self._free_gradients = shape, passes, update, free_gradients
        self._objective, self._context, self._device = objective, context, device
        self._tokens = torch.zeros(packs, count, dtype=torch.int32, device=device)
        self._needed: dict[str, Tensor] = {}  # of the loss, [packs, ...] each, see `whole_arrays`
        positions = torch.arange(length, dtype=torch.int32, device=device).repeat(sequences)
        offsets = torch.arange(0, count + 1, length, dtype=torch.int32, device=device)
        self._batches = [Batch(tokens, positions, offsets, longest=length) for tokens in self._tokens]
        self._own, self._norm, self._counted = torch.zeros(3, device=device).unbind()
        self._shares = torch.zeros(1 + len(objective.metrics), device=device)
        self._captured_graphs = CudaGraphs()
        self._captured = False

    def __call__(
        self, packs: Sequence[PackedBatch], before_update: Callable[[], None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shares, norm and count of the step over `packs`, which have the shape of this one."""
        _send(np.stack([one.tokens for one in packs]), self._tokens)
        needed = [whole_arrays(one, self._objective.columns(one)) for one in packs]
        for name in needed[0]:
            values = np.stack([one[name] for one in needed])
            if name not in self._needed:
                self._needed[name] = torch.from_numpy(np.zeros_like(values)).to(self._device)
            _send(values, self._needed[name])
        self._own.fill_(sum(map(self._objective.count, packs)))
        if not self._captured:
            self._captured_graphs.capture_graph("passes", self._run_passes, self._let_go)
        # Capturing runs nothing, and what ran before it left its gradients elsewhere.
        self._captured_graphs.replay("passes")
        before_update()
        if self._captured:
            self._captured_graphs.replay("update")
        else:
            self._captured_graphs.capture_graph("update", self._run_update)  # which runs it once before
            self._captured = True
        return self._shares.clone(), self._norm.clone(), self._counted.clone()

    def _let_go(self) -> None:
        """Of what the warm-up left, and of autograd graphs that nothing but cycles hold: their nodes for the weights
        belong to the stream of launched steps, where a captured backward pass would run them.
        """
        self._free_gradients()
        gc.collect()

    def _micro_batches(self, scale: Tensor) -> list[MicroBatch]:
        return [
            of_whole(batch, {name: one[number] for name, one in self._needed.items()}, scale, self._context)
            for number, batch in enumerate(self._batches)
        ]

    def _run_passes(self) -> None:
        shares, norm, counted = self._passes(self._micro_batches, self._own)
        self._shares.copy_(shares)
        self._norm.copy_(norm)
        self._counted.copy_(counted)

    def _run_update(self) -> None:
        self._update(self._norm)


def _send(values: NDArray[Any], place: Tensor) -> None:
    place.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)


def fixed_shape(batches: Sequence[PackedBatch]) -> Shape | None:
    """That of the step, if all its packs have equally many sequences of one length."""
    counts = {len(one.lengths) for one in batches}
    lengths = {int(length) for one in batches for length in one.lengths}
    return (len(batches), counts.pop(), lengths.pop()) if len(counts) == len(lengths) == 1 else None


def shape_of_all(shape: Shape | None, world_axis: Axis) -> Shape | None:
    """`shape` if all ranks have it, else None. The hosts wait for each other, not for the devices."""
    own = torch.tensor(shape or (0, 0, 0))
    least, negated_most = start_all_reduce(torch.cat([own, -own]), world_axis, "min").wait().view(2, -1)
    return shape if shape is not None and bool((least == -negated_most).all()) else None
