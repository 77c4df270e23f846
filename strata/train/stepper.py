"""From a run's config to the step that trains its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from strata.comm.mesh import Mesh
from strata.models.balance import hold_biases
from strata.models.config import ModelConfig
from strata.models.weights import load
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.train.adapters.frozen import load_frozen
from strata.train.adapters.lora import add_lora
from strata.train.config import BalanceConfig, TrainConfig
from strata.train.data.mixture import DatasetReader
from strata.train.dpo import DpoObjective, Reference, weights_digest
from strata.train.layout import device_memory
from strata.train.phases import Phases
from strata.train.predict.adapters import AdapterStep
from strata.train.predict.estimate import choose_recompute, step_shape
from strata.train.recompute import RECOMPUTE_OF_MODULES, recompute_modules
from strata.train.start import Start
from strata.train.steps.balance import check_balance
from strata.train.steps.make import fresh, make_step, stored
from strata.train.steps.objective import NextToken, Objective
from strata.train.steps.parallel_step import ParallelStep
from strata.train.steps.tune_step import TuneStep
from strata.train.trainable import check_trainable


@dataclass(frozen=True)
class Setting:
    """What a step is made from. documents: of all datasets whose samples it may be given. before_update: called right
    before masters and optimizer state change. recompute: see `chosen_recompute`.
    """

    config: TrainConfig
    start: Start
    layout: Layout
    mesh: Mesh
    documents: DatasetReader
    folder: Path
    phases: Phases
    before_update: Callable[[], None]
    recompute: str


def make_stepper(setting: Setting) -> ParallelStep | TuneStep:
    """All weights of any layout, or with [lora] and [dpo] what those train. A collective call."""
    config = setting.config
    _check_device(config.run.precision, setting.mesh.world.device)
    check_trainable(setting.start.config)
    check_balance(setting.start.config, config.balance)
    if config.lora is not None or config.dpo is not None:
        return _tune_step(setting)
    weights = setting.start.weights
    return make_step(
        setting.start.config,
        setting.layout,
        setting.mesh,
        config.optimizer,
        fresh(config.run.seed) if weights is None else stored(weights),
        precision=config.run.precision,
        recompute=setting.recompute,
        balance=_balance(setting),
        phases=setting.phases,
        before_update=setting.before_update,
    )


def chosen_recompute(config: TrainConfig, model: ModelConfig, layout: Layout, device: torch.device) -> str:
    """What the backward pass computes again: as the config says, else the first way that fits. Preferences without
    adapters are learned without.
    """
    tunes = config.lora is not None or config.dpo is not None
    if config.run.recompute != "auto":
        if tunes and config.run.recompute not in RECOMPUTE_OF_MODULES:
            raise ValueError(
                f"run.recompute = {config.run.recompute!r} is for runs without [lora] and [dpo]; use 'auto', or one of "
                f"{', '.join(RECOMPUTE_OF_MODULES)}"
            )
        return config.run.recompute
    if device.type == "cpu" or (tunes and config.lora is None):
        return "none"
    if config.lora is not None:
        return AdapterStep.of(config, model, layout).choose_recompute(device_memory(device))
    return choose_recompute(step_shape(config, model, layout), device_memory(device))


def _balance(setting: Setting) -> BalanceConfig | None:
    """Experts that nobody has spoken of are balanced by the loss, and those of models with biases by these."""
    experts = setting.start.config.experts
    if experts is None:
        return None
    return setting.config.balance or BalanceConfig("bias" if experts.biased else "loss")


def _tune_step(setting: Setting) -> TuneStep:
    config, device = setting.config, setting.mesh.world.device
    assert setting.start.weights is not None
    narrow = _compute_dtype(device)
    objective: Objective = NextToken()
    if config.dpo is not None:
        objective = DpoObjective(_reference(setting, narrow), config.dpo)
    trained: torch.nn.Module
    if config.lora is not None:
        model = load_frozen(setting.start.weights, setting.start.config, config.lora.quantization, device, narrow)
        trained = add_lora(model, config.lora, config.run.seed)
    else:
        model, _ = load(setting.start.weights, "cpu", torch.float32)
        trained = model.to(device)
        hold_biases(model)
    recompute_modules(model, setting.recompute)
    return TuneStep(
        model,
        trained,
        objective,
        config.optimizer,
        setting.layout,
        setting.mesh,
        compute_dtype=None if config.lora is not None else narrow,
        phases=setting.phases,
        before_update=setting.before_update,
    )


def _compute_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _reference(setting: Setting, dtype: torch.dtype) -> Reference:
    """Of DPO, of the model as the run computes with it."""
    weights, device, lora = setting.start.weights, setting.mesh.world.device, setting.config.lora
    assert weights is not None
    packed_as = None if lora is None else lora.quantization
    return Reference.computed(
        lambda: load_frozen(weights, setting.start.config, packed_as, device, dtype),
        setting.documents,
        setting.config.data.tokens_per_pack,
        setting.folder / "reference.safetensors",
        weights_digest(weights) + (f" {packed_as}" if packed_as else ""),
        all_ranks(setting.mesh),
    )


def _check_device(precision: str, device: torch.device) -> None:
    if precision != "bf16" and (device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ValueError(
            f"run.precision = {precision!r} needs a GPU that multiplies 8-bit floating point (compute capability 8.9 "
            f"or higher); use 'bf16' on this {device.type}"
        )
