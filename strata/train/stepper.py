"""From a run's config to the step that trains its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from strata.comm.mesh import Mesh
from strata.models.config import ModelConfig
from strata.models.quantized.checkpoint import packed_format
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.train.adapters.frozen import load_frozen, packed_line
from strata.train.adapters.lora import LoraConfig
from strata.train.config import BalanceConfig, TrainConfig
from strata.train.dpo import DpoObjective, Reference, weights_digest
from strata.train.layout import device_memory
from strata.train.phases import Phases
from strata.train.predict.adapters import AdapterStep
from strata.train.predict.estimate import choose_recompute, step_shape
from strata.train.recompute import RECOMPUTE_OF_MODULES
from strata.train.start import RunData, Start, once_loader
from strata.train.steps.balance import check_balance
from strata.train.steps.make import Adapters, Values, compute_dtype_on, fresh, make_step, stored, values_of
from strata.train.steps.parallel_step import ParallelStep
from strata.train.trainable import check_trainable


@dataclass(frozen=True)
class Setting:
    """What a step is made from. data: all whose samples it may be given. before_update: called right before masters and
    optimizer state change. recompute: see `chosen_recompute`. report: receives lines for people.
    """

    config: TrainConfig
    start: Start
    layout: Layout
    mesh: Mesh
    data: RunData
    folder: Path
    phases: Phases
    before_update: Callable[[], None]
    recompute: str
    report: Callable[[str], None]


def make_stepper(setting: Setting) -> ParallelStep:
    """Of any layout. It trains all weights, or with [lora] adapters; for preferences with [dpo], else for the next
    token. A collective call.
    """
    check_trainable(setting.start.config)  # before weights are read
    config, weights = setting.config, setting.start.weights
    _check_device(config.run.precision, setting.mesh.world.device)
    check_trainable(setting.start.config)
    check_balance(setting.start.config, config.balance)
    values = fresh(config.run.seed) if weights is None else stored(weights)
    adapters = None
    if config.lora is not None:
        values, adapters = _frozen(setting, config.lora, values)
    reference = Reference()
    step = make_step(
        setting.start.config,
        setting.layout,
        setting.mesh,
        config.optimizer,
        values,
        objective=None if config.dpo is None else DpoObjective(reference, config.dpo),
        adapters=adapters,
        precision=config.run.precision,
        recompute=setting.recompute,
        balance=_balance(setting),
        phases=setting.phases,
        before_update=setting.before_update,
    )
    if config.dpo is not None:
        _compute(reference, step, setting)
    return step


def chosen_recompute(config: TrainConfig, model: ModelConfig, layout: Layout, device: torch.device) -> str:
    """What the backward pass computes again: as the config says, else the first way that fits."""
    if config.run.recompute != "auto":
        if config.lora is not None and config.run.recompute not in RECOMPUTE_OF_MODULES:
            raise ValueError(
                f"run.recompute = {config.run.recompute!r} is for runs without [lora]; use 'auto', or one of "
                f"{', '.join(RECOMPUTE_OF_MODULES)}"
            )
        return config.run.recompute
    if device.type == "cpu":
        return "none"
    if config.lora is not None:
        return AdapterStep.of(config, model, layout).choose_recompute(device_memory(device))
    return choose_recompute(step_shape(config, model, layout), device_memory(device))


def _balance(setting: Setting) -> BalanceConfig | None:
    """Experts that nobody has spoken of are balanced by the loss, and those of models with biases by these; with [lora]
    or [dpo] they stay as busy as they are.
    """
    config, experts = setting.config, setting.start.config.experts
    if experts is None or config.lora is not None or config.dpo is not None:
        return None
    return config.balance or BalanceConfig("bias" if experts.biased else "loss")


def _frozen(setting: Setting, lora: LoraConfig, plain: Values) -> tuple[Values, Adapters]:
    """The values of the model that stays as it is, and what trains beside it. plain: those values where nothing is
    packed.
    """
    weights, device = setting.start.weights, setting.mesh.world.device
    assert weights is not None
    seed = setting.config.run.seed
    if lora.quantization is None and packed_format(weights) is None:
        return plain, Adapters(lora, seed)
    dtype = compute_dtype_on(device)
    model, packed = load_frozen(weights, setting.start.config, lora.quantization, device, dtype)
    if packed:
        setting.report(packed_line(packed, dtype))
    return values_of(model), Adapters(lora, seed, packed)


def _compute(reference: Reference, step: ParallelStep, setting: Setting) -> None:
    """The reference of DPO, by the model as the run computes with it."""
    weights, lora, documents = setting.start.weights, setting.config.lora, setting.mesh.flattened("dp", "shard")
    assert weights is not None
    packed_as, precision = None if lora is None else lora.quantization, setting.config.run.precision
    reference.compute(
        step.logprobs,
        once_loader(setting.config, setting.data, 0, rank=documents.index, ranks=documents.size),
        setting.data.reader,
        setting.folder / "reference.safetensors",
        weights_digest(weights) + (f" {packed_as}" if packed_as else "") + f" {precision}" * (precision != "bf16"),
        documents,
        all_ranks(setting.mesh),
    )


def _check_device(precision: str, device: torch.device) -> None:
    if precision != "bf16" and (device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ValueError(
            f"run.precision = {precision!r} needs a GPU that multiplies 8-bit floating point (compute capability 8.9 "
            f"or higher); use 'bf16' on this {device.type}"
        )
