"""The engine that `strata serve` would start on a device that need not be here: its pages, its scheduler's sizes and
the times of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from strata.comm.symmetric import imagined
from strata.cost.step_model import StepModel
from strata.engine.engine_config import EngineConfig
from strata.engine.ledger import Ledger
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.startup.memory import RankPlace, listed_memory, rank_memory, rank_setup
from strata.engine.startup.sequences import with_sequences
from strata.engine.step_cost import step_target, step_times
from strata.hardware.figures import Device
from strata.kernels.device_limits import DeviceLimits, why_not
from strata.models.config import ModelConfig
from strata.parallel.serving_shard import TENSOR_AXIS
from strata.plan.meta_model import engine_model
from strata.plan.simulate.prices import PredictedPrices
from strata.plan.simulate.replica import EngineShape


@dataclass(frozen=True)
class PredictedEngine:
    """shape: for the scheduler. prices: of steps. ledger: of the memory of its first rank. sources: of what was
    measured of the device, in words."""

    shape: EngineShape
    prices: PredictedPrices
    ledger: Ledger
    sources: tuple[str, ...]


def predicted_engine(asked: EngineConfig, config: ModelConfig, device: Device) -> PredictedEngine:
    """Raises ValueError for a model that does not fit, with options that have room; for a device of which too little is
    known; and for options with which no engine is simulated."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(asked, name) > 1:
            raise ValueError(f"{name}={getattr(asked, name)} is not simulated; only tensor_parallel_size is")
    limits = DeviceLimits.listed(device)
    limit = why_not(limits)
    if limit is not None:
        raise ValueError(f"{device.key}: {limit}; simulate a device that runs Strata's own kernels, such as h200")
    place = RankPlace(torch.device("cuda"), limits, memory=listed_memory(device))
    asked = with_sequences(asked, config, place)
    part = rank_setup(asked, config, place)
    ledger = rank_memory(asked, config, place, part)
    sizes, shard = part.sizes, part.shard
    if shard is not None:
        axis = imagined(TENSOR_AXIS, asked.tensor_parallel_size)
        shard = replace(shard, axes={**shard.axes, TENSOR_AXIS: axis})
    model = engine_model(asked, config, device, shard)
    times = StepModel(model, device)
    target = None
    if asked.tpot_target_ms is not None:
        captured = model.program.sizes.mixed_tokens
        found = step_times(model, device.product, max(captured, default=0))
        target = step_target(asked, found, captured, sizes.captured)
    scheduler = SchedulerConfig(asked.max_sequences, sizes.max_tokens, sizes.max_length, asked.seed or 0, target)
    shape = EngineShape(scheduler, ledger.pages, ledger.page_size, asked.enable_prefix_caching)
    if sizes.states is not None or any(group.window is not None for group in sizes.groups):
        snapshots = None if sizes.states is None else ledger.snapshots
        shape = replace(shape, groups=sizes.groups, group_pages=ledger.group_pages, snapshots=snapshots)
    prices = PredictedPrices(times, times.copy_seconds(ledger.state_bytes))
    return PredictedEngine(shape, prices, ledger, times.sources)
