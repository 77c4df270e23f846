"""From a run's config to the step that trains its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from strata.comm.mesh import Mesh
from strata.models.config import ModelConfig
from strata.models.expert_config import ExpertsConfig
from strata.models.quantized.checkpoint import quantized_format
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.train.adapters.frozen import load_frozen, quantized_line
from strata.train.config import BalanceConfig, TrainConfig
from strata.train.dpo import DpoObjective, Reference, weights_digest
from strata.train.layout import device_memory
from strata.train.phases import Phases
from strata.train.predict.adapters import AdapterStep
from strata.train.predict.estimate import choose_recompute, step_shape
from strata.train.start import RunData, Start, once_loader
from strata.train.steps.make import Adapters, compute_dtype_on, fresh, make_step, stored, values_of
from strata.train.steps.parallel_step import ParallelStep


def make_stepper(
    config: TrainConfig,
    start: Start,
    data: RunData,
    layout: Layout,
    mesh: Mesh,
    recompute: str,
    phases: Phases,
    before_update: Callable[[], None],
    report: Callable[[str], None],
) -> ParallelStep:
    """Of any layout. It trains all weights, or with [lora] adapters; for preferences with [dpo], else for the next
    token. A collective call.

    data: all whose samples it may be given. recompute: see `chosen_recompute`. before_update: called right before
    masters and optimizer state change. report: receives lines for people.
    """
    _check_device(config.run.precision, mesh.world.device)
    values = fresh(config.run.seed) if start.weights is None else stored(start.weights)
    adapters = None
    if config.lora is not None and start.weights is not None:
        adapters = Adapters(config.lora, config.run.seed)
        if config.lora.quantization is not None or quantized_format(start.weights) is not None:
            device, dtype = mesh.world.device, compute_dtype_on(mesh.world.device)
            model, packed = load_frozen(start.weights, start.config, config.lora.quantization, device, dtype)
            values, adapters = values_of(model), replace(adapters, packed=packed)
            if packed:
                report(quantized_line(packed, dtype))
    reference = Reference()
    step = make_step(
        start.config,
        layout,
        mesh,
        config.optimizer,
        values,
        objective=None if config.dpo is None else DpoObjective(reference, config.dpo),
        adapters=adapters,
        precision=config.run.precision,
        recompute=recompute,
        balance=_balance(config, start.config.experts),
        phases=phases,
        before_update=before_update,
    )
    if config.dpo is not None:
        # By the model as the run computes with it.
        documents = mesh.flattened("dp", "shard")
        loader = once_loader(config, data, 0, rank=documents.index, ranks=documents.size)
        cache = Path(config.run.out) / "reference.safetensors"
        reference.compute(step.logprobs, loader, data.reader, cache, _base(config, start), documents, all_ranks(mesh))
    return step


def chosen_recompute(config: TrainConfig, model: ModelConfig, layout: Layout, device: torch.device) -> str:
    """What the backward pass computes again: as the config says, else the first way that fits."""
    if config.run.recompute != "auto":
        return config.run.recompute
    if device.type == "cpu":
        return "none"
    if config.lora is not None:
        return AdapterStep.of(config, model, layout).choose_recompute(device_memory(device))
    return choose_recompute(step_shape(config, model, layout), device_memory(device))


def _balance(config: TrainConfig, experts: ExpertsConfig | None) -> BalanceConfig | None:
    """Experts that nobody has spoken of are balanced by the loss, and those of models with biases by these; with [lora]
    or [dpo] they stay as busy as they are.
    """
    if config.balance is not None or experts is None or config.lora is not None or config.dpo is not None:
        return config.balance
    return BalanceConfig("bias" if experts.biased else "loss")


def _base(config: TrainConfig, start: Start) -> str:
    """What tells the model that DPO begins with, as the run computes with it, from others."""
    assert start.weights is not None
    packed_as = None if config.lora is None else config.lora.quantization
    precision = None if config.run.precision == "bf16" else config.run.precision
    return " ".join(filter(None, (weights_digest(start.weights), packed_as, precision)))


def _check_device(precision: str, device: torch.device) -> None:
    if precision != "bf16" and (device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ValueError(
            f"run.precision = {precision!r} needs a GPU that multiplies 8-bit floating point (compute capability 8.9 "
            f"or higher); use 'bf16' on this {device.type}"
        )
