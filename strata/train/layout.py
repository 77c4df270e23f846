"""How the ranks of a run share its work: as the config says, or chosen for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from strata.comm.launch import World
from strata.models.config import ModelConfig
from strata.models.quantized.checkpoint import quantized_format
from strata.parallel.layout import Layout, auto_layout
from strata.train.config import TrainConfig


def chosen_layout(config: TrainConfig, model: ModelConfig, world: World, report: Callable[[str], None]) -> Layout:
    """The layout of a run, checked. report: is called with why, if it was chosen here. Raises ValueError if none
    fits."""
    layout = config.parallel
    if layout is None and config.lora is not None:
        layout = Layout(dp=world.size)
    elif layout is None:
        layout, reason = auto_layout(model, world.size, device_memory(world.device))
        if world.size > 1:
            report(f"layout: {reason}")
    layout = with_micro_batches(layout, config.data.packs_per_step)
    layout.check(model, world.size)
    if config.lora is not None and (config.lora.quantization or quantized_format(config.start.folder)):
        check_quantized(layout)
    return layout


def check_quantized(layout: Layout) -> None:
    """Raises ValueError for a layout of which training cannot divide packed weights."""
    for name in ("tp", "ep"):
        if getattr(layout, name) > 1:
            raise ValueError(
                f"{name} = {getattr(layout, name)} would divide packed weights among ranks, which training does not do "
                f"yet; set {name} = 1 and use dp, shard, cp or pp, or keep the weights in floats"
            )


def with_micro_batches(layout: Layout, packs_per_step: int) -> Layout:
    """A pipeline splits the step of a replica into its packs; without one that says nothing."""
    if layout.micro_batches != 1:
        raise ValueError("parallel.micro_batches follows from data.packs_per_step; remove it")
    if layout.pp == 1:
        return layout
    return replace(layout, micro_batches=max(1, packs_per_step // (layout.dp * layout.shard)))


def device_memory(device: torch.device) -> int:
    """Bytes of the GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
