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

from strata.cache.staging import fetch, send
from strata.comm.mesh import Axis
from strata.engine.program.source import MovingExperts
from strata.engine.startup.clock import Log
from strata.models.experts import Experts
from strata.parallel.expert_balance.moves import move_experts
from strata.parallel.expert_balance.placement import Numbers, place_experts, rank_loads, rebalanced, turns
from strata.parallel.serving_shard import RankShard

# The heaviest rank of a layer has to become lighter by so much for its weights to be copied.
_GAIN = 0.05


def expert_tables(shard: RankShard, device: torch.device) -> MovingExperts:
    """What the graphs of a rank read and count by, for experts that are where they are loaded; nothing is counted."""
    config = shard.whole.experts
    assert config is not None
    table = torch.from_numpy(turns(_loaded(shard), config.count)).to(device)
    totals = torch.zeros(len(config.layers), config.count, dtype=torch.int64, device=device)
    return MovingExperts(table.expand(len(config.layers), *table.shape).contiguous(), totals)


class RankExperts:
    """A rank's experts: which slots of all ranks hold which, by layer, and their weights.

    tables: what the rank's graphs read and count by, on its device.
    """

    def __init__(self, model: nn.Module, shard: RankShard, axis: Axis, device: torch.device) -> None:
        self.axis, self.tables = axis, expert_tables(shard, device)
        self._modules = _experts_by_layer(model)
        self._slots: dict[int, Numbers] = dict.fromkeys(self._modules, _loaded(shard))

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
        module = self._modules[layer]
        move_experts([one.data for one in module.parameters()], self._slots[layer], placed, self.axis)
        module.local = tuple(placed.reshape(self.axis.size, -1)[self.axis.index].tolist())
        held = self.tables.turns[layer]
        table = turns(placed, len(held))
        held.copy_(send(held.device, table=table.ravel())["table"].view(table.shape))
        self._slots[layer] = placed


class ExpertBalance:
    """When rank 0 lets experts move, and where to.

    interval: steps between two readings of the counts. A placement is by the choices since the reading before. log:
    gets a line once all layers have been placed.
    """

    def __init__(self, experts: RankExperts, interval: int, log: Log) -> None:
        self._experts, self._interval, self._log = experts, interval, log
        self._steps = 0
        self._before: NDArray[np.int64] | None = None
        self._reading: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._wanted: Iterator[tuple[int, Numbers] | None] = iter(())

    def next_move(self) -> tuple[int, Numbers] | None:
        """Called before each step: the layer and the experts in its slots, if some are to move now. Never waits."""
        if self._steps % self._interval == 0 and self._reading is None:
            self._reading = _read(self._experts.tables.totals)
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
        heaviest: list[tuple[float, float]] = []
        moved = 0
        for layer in self._experts.layers:
            current, loads = self._experts.slots(layer), counts[layer].astype(np.float64)
            if not loads.any():
                continue
            placed = rebalanced(current, place_experts(loads, len(current), ranks), loads, ranks, _GAIN)
            mean = float(loads.sum()) / ranks
            before, after = (float(rank_loads(one, loads, ranks).max()) / mean for one in (current, placed))
            heaviest.append((before, after))
            moved += placed is not current
            yield None if placed is current else (layer, placed)
        if not heaviest:
            return
        before, after = np.mean(heaviest, axis=0)
        self._log(
            f"experts: the heaviest rank of a layer bore {before:.2f} times the mean, and {after:.2f} times by the "
            f"placement from now on; {moved} of {len(heaviest)} layers changed"
        )


def _loaded(shard: RankShard) -> Numbers:
    """[slots] the expert that each slot is loaded with; see `rank_config`."""
    assert shard.slots is not None
    assert shard.whole.experts is not None
    loaded: Numbers = np.arange(shard.slots.total) % shard.whole.experts.count
    return loaded


def _read(totals: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if totals.device.type == "cpu":
        return totals.clone(), None
    host, arrived = fetch(totals), torch.cuda.Event()
    arrived.record()
    return host, arrived


def _experts_by_layer(model: nn.Module) -> dict[int, Experts]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            layer = next(int(part) for part in name.split(".") if part.isdecimal())
            found[layer] = module
    return found
