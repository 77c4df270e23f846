"""AdamW (Loshchilov and Hutter 2019) over the parts of parameters that a rank keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from strata.kernels.optimizer.adamw import adamw
from strata.parallel.data_parallel import Part
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.memory import StateMemory
from strata.train.optimizer.part_optimizer import decay_of, gradient_of, joined


@dataclass(frozen=True)
class _Run:
    """Parts that lie side by side and decay alike: one launch changes them all. Tensors are flat, of one length."""

    parts: Sequence[Part]
    weight: Tensor
    master: Tensor
    first: Tensor
    second: Tensor
    decay: float

    def places(self) -> list[slice]:
        """Of the parts, within the run."""
        ends = accumulate((part.master.numel() for part in self.parts), initial=0)
        return [slice(*bounds) for bounds in pairwise(ends)]

    def gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Of the whole run where they lie side by side too, else of one part after another."""
        apart = [gradient_of(part) for part in self.parts]
        whole = joined(apart)
        return zip(self.places(), apart, strict=True) if whole is None else iter([(slice(None), whole)])


class AdamW:
    """A `PartOptimizer`, one pass over memory: kinds of state are "exp_avg" and "exp_avg_sq"."""

    def __init__(
        self,
        parts: Sequence[Part],
        masters: Sequence[Tensor],
        config: OptimizerConfig,
        memory: StateMemory,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """masters: those of the parts, flat, where `memory` keeps them. dtype: of masters and moments."""
        self._config, self._memory = config, memory
        self._runs = [_make_run(run, config.weight_decay, memory) for run in _divide(parts, masters, config)]
        # Learning rate, both bias corrections, what gradients are multiplied by: see `adamw`.
        self._step = torch.zeros(4, dtype=dtype, device=device)
        self._steps = 0

    def begin(self, rate: float) -> None:
        self._steps += 1
        self._step[0].fill_(rate)
        self._step[1].fill_(1 - self._config.beta1**self._steps)
        self._step[2].fill_(1 - self._config.beta2**self._steps)

    @torch.no_grad()
    def update(self, scale: Tensor) -> None:
        self._step[3].copy_(scale)
        self._memory.start()
        for run in self._runs:
            for place, gradient in run.gradients():
                state = [one[place] for one in (run.master, run.first, run.second)]
                self._memory.run(state, partial(self._change, run.weight[place], gradient, run.decay))
        self._memory.finish()

    def _change(self, weight: Tensor, gradient: Tensor, decay: float, held: slice, state: Sequence[Tensor]) -> None:
        config = self._config
        adamw(weight[held], *state, gradient[held], self._step, config.beta1, config.beta2, config.eps, decay)

    def state(self) -> dict[str, list[Tensor]]:
        kinds = {"exp_avg": [run.first for run in self._runs], "exp_avg_sq": [run.second for run in self._runs]}
        if self._memory.keeps_masters:
            kinds["master"] = [run.master for run in self._runs]
        places = [run.places() for run in self._runs]
        return {
            kind: [whole[place] for whole, held in zip(tensors, places, strict=True) for place in held]
            for kind, tensors in kinds.items()
        }

    @torch.no_grad()
    def restored(self, steps: int) -> None:
        self._steps = steps
        for run in self._runs:
            run.weight.copy_(run.master)


def _divide(
    parts: Iterable[Part], masters: Iterable[Tensor], config: OptimizerConfig
) -> Iterator[list[tuple[Part, Tensor]]]:
    """Runs of parts with their masters, in order."""
    run: list[tuple[Part, Tensor]] = []
    for part, master in zip(parts, masters, strict=True):
        if run and not _continues(run[-1], (part, master), config):
            yield run
            run = []
        run.append((part, master))
    if run:
        yield run


def _continues(before: tuple[Part, Tensor], after: tuple[Part, Tensor], config: OptimizerConfig) -> bool:
    decays = {decay_of(part, config.weight_decay) for part, _ in (before, after)}
    memories = [[part.weight.view(-1) for part, _ in (before, after)], [master for _, master in (before, after)]]
    return len(decays) == 1 and all(joined(memory) is not None for memory in memories)


def _make_run(run: Sequence[tuple[Part, Tensor]], decay: float, memory: StateMemory) -> _Run:
    parts = [part for part, _ in run]
    weight, master = joined([part.weight.view(-1) for part in parts]), joined([one for _, one in run])
    assert weight is not None
    assert master is not None
    first, second = (memory.zeros(master.numel(), master.dtype) for _ in range(2))
    return _Run(parts, weight.detach(), master, first, second, decay_of(parts[0], decay))
