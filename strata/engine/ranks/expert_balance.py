"""Experts of a running engine move between its ranks, so that those that are chosen often do not wait for one of them.

Routing is counted on the device in each step. Every so many steps rank 0 reads the counts without waiting for them,
and places the experts of a layer anew before each of the next steps; the ranks copy weights between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from strata.comm.mesh import Axis
from strata.engine.transfer import fetch, send
from strata.models.experts import Experts
from strata.parallel.expert_balance.moves import move_experts
from strata.parallel.expert_balance.placement import Numbers, place_experts, rebalanced, turns
from strata.parallel.serving_shard import RankShard

# The heaviest rank of a layer has to become lighter by so much for its weights to be copied.
_GAIN = 0.05


class RankExperts:
    """A rank's experts: which slots of all ranks hold which, by layer, and their weights.

    totals: [layers, experts] int64, how often each was chosen; the graphs add to it. turns: [layers, experts, period]
    int32, by which they find the slot of a choice (`shard` of `strata.graph.shard`).
    """

    def __init__(self, model: nn.Module, shard: RankShard, axis: Axis, device: torch.device) -> None:
        assert shard.slots is not None
        config = shard.whole.experts
        assert config is not None
        self.axis, self.count = axis, config.count
        self._weights = _weights_by_layer(model)
        first = np.arange(shard.slots.total) % config.count
        self._slots: dict[int, Numbers] = dict.fromkeys(self._weights, first)
        shape = (len(config.layers), config.count)
        self.totals = torch.zeros(shape, dtype=torch.int64, device=device)
        table = torch.from_numpy(turns(first, config.count)).to(device)
        self.turns = table.expand(len(config.layers), *table.shape).contiguous()

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that have experts."""
        return tuple(self._slots)

    def slots(self, layer: int) -> Numbers:
        """[slots] the expert in each slot of all ranks."""
        return self._slots[layer]

    @torch.inference_mode()
    def move(self, layer: int, placed: Numbers) -> None:
        """Let the slots of a layer hold these experts, in steps launched from now on. All ranks call it."""
        move_experts(self._weights[layer], self._slots[layer], placed, self.axis)
        table = turns(placed, self.count)
        arrived = send(self.turns.device, table=table.ravel())["table"]
        self.turns[layer].copy_(arrived.view(table.shape))
        self._slots[layer] = placed


class ExpertBalance:
    """When rank 0 lets experts move, and where to.

    interval: steps between two readings of the counts. A placement is by the choices since the reading before.
    """

    def __init__(self, experts: RankExperts, interval: int) -> None:
        self._experts, self._interval = experts, interval
        self._steps = 0
        self._before: NDArray[np.int64] | None = None
        self._reading: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._wanted: Iterator[tuple[int, Numbers] | None] = iter(())

    def next_move(self) -> tuple[int, Numbers] | None:
        """Called before each step: the layer and the experts in its slots, if some are to move now. Never waits."""
        if self._steps % self._interval == 0 and self._reading is None:
            self._reading = _read(self._experts.totals)
        self._steps += 1
        if self._reading is not None and (self._reading[1] is None or self._reading[1].query()):
            counts = self._reading[0].numpy()
            self._reading = None
            if self._before is not None:  # what came first was the start's
                self._wanted = self._moves(counts - self._before)
            self._before = counts
        return next(self._wanted, None)

    def _moves(self, counts: NDArray[np.int64]) -> Iterator[tuple[int, Numbers] | None]:
        """Of one layer after the other the move that pays, or None: placing takes the host some time as well."""
        ranks = self._experts.axis.size
        for layer in self._experts.layers:
            current, loads = self._experts.slots(layer), counts[layer].astype(np.float64)
            placed = rebalanced(current, place_experts(loads, len(current), ranks), loads, ranks, _GAIN)
            yield None if placed is current else (layer, placed)


def _read(totals: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if totals.device.type == "cpu":
        return totals.clone(), None
    host, arrived = fetch(totals), torch.cuda.Event()
    arrived.record()
    return host, arrived


def _weights_by_layer(model: nn.Module) -> dict[int, list[Tensor]]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            layer = next(int(part) for part in name.split(".") if part.isdecimal())
            found[layer] = [parameter.data for parameter in module.parameters()]
    return found
