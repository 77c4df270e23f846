"""AdamW (Loshchilov and Hutter 2019) over the shards of parameters that a rank keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from strata.kernels.optimizer.adamw import Constants, adamw
from strata.parallel.data_parallel import ParameterShard
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.memory import StateMemory
from strata.train.optimizer.sharded_optimizer import decay_of, gradient_of, joined


@dataclass(frozen=True)
class _Group:
    """Shards that lie side by side and decay alike: one launch changes them all. Tensors are flat, of one length."""

    shards: Sequence[ParameterShard]
    weight: Tensor
    master: Tensor
    first: Tensor
    second: Tensor
    decay: float

    def places(self) -> list[slice]:
        """Of the shards, within the group."""
        ends = accumulate((shard.master.numel() for shard in self.shards), initial=0)
        return [slice(*bounds) for bounds in pairwise(ends)]

    def gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Of the whole group where they lie side by side too, else of one shard after another."""
        apart = [gradient_of(shard) for shard in self.shards]
        whole = joined(apart)
        return zip(self.places(), apart, strict=True) if whole is None else iter([(slice(None), whole)])


class AdamW:
    """Changes the masters of the shards that a rank keeps, and rounds them into the shards' weights, in one pass over
    memory: kinds of state are "exp_avg" and "exp_avg_sq".

    A step: `begin` on the host, then, once `Gradients.reduce` has set the gradients of the masters, `update`. All ranks
    call these alike.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        masters: Sequence[Tensor],
        config: OptimizerConfig,
        memory: StateMemory,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """masters: those of the shards, flat, where `memory` keeps them. dtype: of masters and moments."""
        self._config, self._memory = config, memory
        self._groups = [_make_group(group, config.weight_decay, memory) for group in _divide(shards, masters, config)]
        # Learning rate, both bias corrections, what gradients are multiplied by: see `adamw`.
        self._step = torch.zeros(4, dtype=dtype, device=device)
        self._steps = 0

    def begin(self, rate: float) -> None:
        """What the host decides, written to the device: learning rate, and what follows from the number of the step.

        A step that `update` skips counts as one.
        """
        self._steps += 1
        self._step[0].fill_(rate)
        self._step[1].fill_(1 - self._config.beta1**self._steps)
        self._step[2].fill_(1 - self._config.beta2**self._steps)

    @torch.no_grad()
    def update(self, scale: Tensor) -> None:
        """Change masters and weights by the gradients times `scale`, [] on the device; the same launches every step.

        Where `scale` is 0, masters, weights and moments stay, whatever the gradients hold. Does not wait.
        """
        self._step[3].copy_(scale)
        self._memory.start()
        for group in self._groups:
            for place, gradient in group.gradients():
                state = [one[place] for one in (group.master, group.first, group.second)]
                self._memory.run(state, partial(self._change, group.weight[place], gradient, group.decay))
        self._memory.finish()

    def _change(self, weight: Tensor, gradient: Tensor, decay: float, held: slice, state: Sequence[Tensor]) -> None:
        config = self._config
        constants = Constants(config.beta1, config.beta2, config.eps, decay)
        adamw(weight[held], *state, gradient[held], self._step, constants)

    def state(self) -> dict[str, list[Tensor]]:
        """By kind, one flat tensor for each shard, the live memory; without elements where a shard has none of a kind.

        The kind "master" is there only if state lies in host memory: masters of the shards then may hold no values.
        Host tensors are complete when the device has done what `update` launched.
        """
        kinds = {
            "exp_avg": [group.first for group in self._groups],
            "exp_avg_sq": [group.second for group in self._groups],
        }
        if self._memory.keeps_masters:
            kinds["master"] = [group.master for group in self._groups]
        places = [group.places() for group in self._groups]
        return {
            kind: [whole[place] for whole, held in zip(tensors, places, strict=True) for place in held]
            for kind, tensors in kinds.items()
        }

    @torch.no_grad()
    def restored(self, steps: int) -> None:
        """Go on after `steps` steps from masters and state that were filled in place: weights are rounded anew."""
        self._steps = steps
        for group in self._groups:
            group.weight.copy_(group.master)


def _divide(
    shards: Sequence[ParameterShard], masters: Sequence[Tensor], config: OptimizerConfig
) -> list[list[tuple[ParameterShard, Tensor]]]:
    """Groups of shards with their masters, in order."""
    groups: list[list[tuple[ParameterShard, Tensor]]] = []
    for one in zip(shards, masters, strict=True):
        if groups and _continues(groups[-1][-1], one, config):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _continues(
    before: tuple[ParameterShard, Tensor], after: tuple[ParameterShard, Tensor], config: OptimizerConfig
) -> bool:
    decays = {decay_of(shard, config.weight_decay) for shard, _ in (before, after)}
    memories = [[shard.weight.view(-1) for shard, _ in (before, after)], [master for _, master in (before, after)]]
    return len(decays) == 1 and all(joined(memory) is not None for memory in memories)


def _make_group(group: Sequence[tuple[ParameterShard, Tensor]], decay: float, memory: StateMemory) -> _Group:
    shards = [shard for shard, _ in group]
    weight, master = joined([shard.weight.view(-1) for shard in shards]), joined([one for _, one in group])
    assert weight is not None
    assert master is not None
    first, second = (memory.zeros(master.numel(), master.dtype) for _ in range(2))
    return _Group(shards, weight.detach(), master, first, second, decay_of(shards[0], decay))
