"""Muon (Jordan et al. 2024) for the matrices of the layers, whole whatever the layout, and AdamW for the rest.

Momentum is divided as the shards are. Every matrix is gathered to one rank, orthogonalized there, and the result goes
back in shards, while the next ones are gathered (`muon_rounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from strata.comm.collectives import Pending, start_all_to_all
from strata.comm.mesh import Axis
from strata.kernels.optimizer.muon import muon_momentum, muon_update
from strata.parallel.data_parallel import ParameterShard
from strata.train.optimizer.adamw import AdamW
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.memory import StateMemory
from strata.train.optimizer.muon_rounds import MatrixStack, MatrixTransfer, Round, is_layer_matrix
from strata.train.optimizer.orthogonalize import orthogonalize
from strata.train.optimizer.sharded_optimizer import decay_of, gradient_of


@dataclass(frozen=True)
class _LocalSlice:
    """Elements of one of this rank's shards. size: of the step of their matrix."""

    shard: int
    held: slice
    size: float


@dataclass(frozen=True)
class _Exchange:
    """The transfers that begin and end at this rank, each in the order of the other ranks, and how many elements go to
    and come from every rank."""

    sent: Sequence[MatrixTransfer]
    arriving: Sequence[MatrixTransfer]
    sent_counts: Sequence[int]
    arriving_counts: Sequence[int]

    @staticmethod
    def of(transfers: Sequence[MatrixTransfer], axis: Axis) -> _Exchange:
        sent = sorted((one for one in transfers if one.source == axis.index), key=lambda one: one.target)
        arriving = sorted((one for one in transfers if one.target == axis.index), key=lambda one: one.source)
        counts = [[0] * axis.size, [0] * axis.size]
        for one in sent:
            counts[0][one.target] += one.elements
        for one in arriving:
            counts[1][one.source] += one.elements
        return _Exchange(sent, arriving, *counts)

    def start(self, values: Tensor, axis: Axis) -> Pending:
        return start_all_to_all(values, axis, self.sent_counts, self.arriving_counts)


@dataclass(frozen=True)
class _OwnRound:
    """A `Round` as one rank sees it. held: what this rank has of matrices: first what it sends to the owners, then that
    of which other ranks send a copy. changed: what it has, as the results arrive.
    """

    batch: tuple[MatrixStack, ...]
    gathered: _Exchange
    returned: _Exchange
    held: Sequence[_LocalSlice]
    changed: Sequence[_LocalSlice]


class Muon:
    """As `AdamW` to a step; kinds of state are "momentum", and those of that.

    A step is rate * 0.2 * sqrt(max(rows, columns)) against the orthogonal matrix, whose elements then have a root mean
    square as AdamW's steps do, so its learning rate carries over (Liu et al. 2025).
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        masters: Sequence[Tensor],
        config: OptimizerConfig,
        memory: StateMemory,
        rounds: Sequence[Round],
        axis: Axis,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """masters, dtype: as for `AdamW`. rounds: of the ranks along `axis`, which together hold every matrix whole."""
        self._config, self._memory, self._axis = config, memory, axis
        self._parameter_shards, self._masters = shards, masters
        self._is_matrix = [is_layer_matrix(shard.name, shard.shape) for shard in shards]
        counts = [shard.master.numel() if own else 0 for shard, own in zip(shards, self._is_matrix, strict=True)]
        self._momentum = [memory.zeros(count, dtype) for count in counts]
        others = [place for place, own in enumerate(self._is_matrix) if not own]
        self._adamw = AdamW(
            [shards[place] for place in others], [masters[place] for place in others], config, memory, device, dtype
        )
        places = {shard.name: (place, shard) for place, shard in enumerate(shards)}
        self._rounds = [_own_round(one, axis, places) for one in rounds]
        # Learning rate, and what gradients are multiplied by: see `muon_momentum`.
        self._step = torch.zeros(2, dtype=dtype, device=device)
        is_narrow = device.type == "cuda" and dtype == torch.float32
        # Of the products and of what is sent. The iteration is stable in bfloat16.
        self._dtype = torch.bfloat16 if is_narrow else dtype

    def begin(self, rate: float) -> None:
        self._adamw.begin(rate)
        self._step[0].fill_(rate)

    @torch.no_grad()
    def update(self, scale: Tensor) -> None:
        self._adamw.update(scale)
        self._step[1].copy_(scale)
        self._memory.start()
        returning: tuple[_OwnRound, Pending] | None = None
        gathering = [self._start_gather(one) for one in self._rounds[:1]]
        for now, after in pairwise([*self._rounds, None]):
            assert now is not None
            arrived = gathering.pop().wait()
            if after is not None:
                gathering.append(self._start_gather(after))
            results = _orthogonalized(now, arrived)
            pending = now.returned.start(results, self._axis)
            if returning is not None:
                self._apply(*returning)
            returning = now, pending
        if returning is not None:
            self._apply(*returning)
        self._memory.finish()

    def _start_gather(self, now: _OwnRound) -> Pending:
        """Change the momentum of what this rank holds, and send it to the owners."""
        counts = [local.held.stop - local.held.start for local in now.held]
        made = torch.empty(sum(counts), dtype=self._dtype, device=self._step.device)
        for local, result in zip(now.held, made.split(counts) if counts else (), strict=True):
            gradient = gradient_of(self._parameter_shards[local.shard])[local.held]
            work = partial(self._change_momentum, result, gradient)
            self._memory.run([self._momentum[local.shard][local.held]], work)
        return now.gathered.start(made[: sum(now.gathered.sent_counts)], self._axis)

    def _change_momentum(self, result: Tensor, gradient: Tensor, held: slice, state: Sequence[Tensor]) -> None:
        muon_momentum(result[held], state[0], gradient[held], self._step, self._config.momentum)

    def _apply(self, now: _OwnRound, returned: Pending) -> None:
        counts = [local.held.stop - local.held.start for local in now.changed]
        for local, direction in zip(now.changed, returned.wait().split(counts) if counts else (), strict=True):
            weight = self._parameter_shards[local.shard].weight.view(-1)[local.held]
            work = partial(self._change_master, weight, direction, local)
            self._memory.run([self._masters[local.shard][local.held]], work)

    def _change_master(
        self, weight: Tensor, direction: Tensor, local: _LocalSlice, held: slice, state: Sequence[Tensor]
    ) -> None:
        decay = decay_of(self._parameter_shards[local.shard], self._config.weight_decay)
        muon_update(weight[held], state[0], direction[held], self._step, local.size, decay)

    def state(self) -> dict[str, list[Tensor]]:
        kinds = {"momentum": self._momentum}
        nothing = self._step.new_zeros(0)
        for kind, tensors in self._adamw.state().items():
            others = iter(tensors)
            kinds[kind] = [nothing if own else next(others) for own in self._is_matrix]
        return kinds | ({"master": list(self._masters)} if self._memory.keeps_masters else {})

    @torch.no_grad()
    def restored(self, steps: int) -> None:
        self._adamw.restored(steps)
        for shard, master, own in zip(self._parameter_shards, self._masters, self._is_matrix, strict=True):
            if own:
                shard.weight.view(-1).copy_(master)


def _orthogonalized(now: _OwnRound, arrived: Tensor) -> Tensor:
    """What arrived from all ranks, flat, to the results for all ranks, flat."""
    if not now.batch:
        return arrived
    arriving = now.gathered.arriving
    count, shape = sum(stack.count for stack in now.batch), now.batch[0].shape
    batch = arrived.new_empty((count, *shape))
    regions = dict(_regions(now.batch, batch))
    flat = {key: region.view(-1) if region.is_contiguous() else region.flatten() for key, region in regions.items()}
    for transfer, local in zip(arriving, arrived.split([one.elements for one in arriving]), strict=True):
        flat[transfer.stack, transfer.box][transfer.start : transfer.end] = local
    for key, region in regions.items():
        if not region.is_contiguous():
            region.copy_(flat[key].view_as(region))
    made = orthogonalize(batch).contiguous()
    flat = {key: region.flatten() for key, region in _regions(now.batch, made)}
    return torch.cat([flat[one.stack, one.box][one.start : one.end] for one in now.returned.sent])


def _regions(stacks: Sequence[MatrixStack], batch: Tensor) -> Iterator[tuple[tuple[MatrixStack, int], Tensor]]:
    """Where the boxes of each stack lie in the batch of all of them, [matrices, rows, columns]; views."""
    for stack, held in zip(stacks, batch.split([stack.count for stack in stacks]), strict=True):
        rows = held.view(-1, stack.shape[1])
        for number, box in enumerate(stack.boxes):
            yield (stack, number), rows[slice(*box.rows), slice(*box.columns)]


def _own_round(whole: Round, axis: Axis, places: dict[str, tuple[int, ParameterShard]]) -> _OwnRound:
    """places: this rank's shards by name, with their numbers."""
    gathered, returned = _Exchange.of(whole.gathered, axis), _Exchange.of(whole.returned, axis)
    sends = {(one.stack, one.box, one.start) for one in gathered.sent}
    idle = [one for one in returned.arriving if (one.stack, one.box, one.start) not in sends]
    held, changed = (_local_slices(some, places) for some in ([*gathered.sent, *idle], returned.arriving))
    return _OwnRound(whole.batches[axis.index], gathered, returned, held, changed)


def _local_slices(
    transfers: Sequence[MatrixTransfer], places: dict[str, tuple[int, ParameterShard]]
) -> list[_LocalSlice]:
    slices = []
    for one in transfers:
        place, shard = places[one.stack.name]
        first = one.stack.boxes[one.box].start + one.start - shard.start
        size = 0.2 * max(one.stack.shape) ** 0.5
        slices.append(_LocalSlice(place, slice(first, first + one.elements), size))
    return slices
