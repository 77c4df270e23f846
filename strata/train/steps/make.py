"""From a model's config, a layout and first values to this rank's training step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from strata.comm.mesh import Mesh
from strata.models.balance import hold_biases
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.initialize import dummy_values, initial_values
from strata.models.layers import CausalLM
from strata.models.quantized.checkpoint import Checkpoint
from strata.parallel.data_parallel import gradient_axes
from strata.parallel.families import TABLES
from strata.parallel.layout import Layout
from strata.parallel.parallelize import Parallel, parallelize
from strata.parallel.pipeline import Pipeline
from strata.parallel.schedules import make_schedule
from strata.parallel.stages import ModelStages, layer_spans
from strata.parallel.tensor import shard_model
from strata.parallel.zero import ZeroGradients
from strata.train.checkpoints.state import fill, state_of, state_shards
from strata.train.compile import TrainingGraph
from strata.train.config import PRECISIONS, RECOMPUTE, BalanceConfig
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.make import make_optimizer
from strata.train.phases import NO_PHASES, Phases
from strata.train.recompute import RECOMPUTE_OF_MODULES, recompute_modules
from strata.train.steps.balance import NoBalancing, make_balancing
from strata.train.steps.one_device import OneDeviceGradients
from strata.train.steps.parallel_step import ParallelStep
from strata.train.steps.passes import GraphPasses, ModulePasses, Passes, PipelinePasses
from strata.train.trainable import check_trainable

# Names and values of the wanted parameters of a model, which is whole and on the meta device, one after another.
Values = Callable[[CausalLM, Container[str]], Iterable[tuple[str, Tensor]]]


def fresh(seed: int) -> Values:
    """Values to train from, the same for any layout."""
    return lambda model, wanted: initial_values(model, seed)


def dummy(seed: int, device: torch.device) -> Values:
    """Values drawn on the device, for measuring speed."""
    return lambda model, wanted: dummy_values(model, seed, device)


def stored(folder: Path) -> Values:
    """Values of a checkpoint folder as Hugging Face lays it out, of the same config."""
    return lambda model, wanted: Checkpoint.of(folder, model).parameters(model, wanted)


def make_step(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    optimizer_config: OptimizerConfig,
    values: Values,
    *,
    precision: str = "bf16",
    recompute: str = "none",
    balance: BalanceConfig | None = None,
    phases: Phases = NO_PHASES,
    before_update: Callable[[], None] = lambda: None,
    max_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    records: bool = True,
) -> ParallelStep:
    """This rank's `Stepper` of a run. A collective call.

    layout: that of the mesh; checked here. The model begins on the meta device and is filled parameter by parameter, so
    no rank holds more of it than its layout says. It computes in bfloat16 on a GPU, and in `dtype`, that of masters and
    optimizer state, on a CPU.

    A layout that divides documents only, with ZeRO of at most 2, runs the merged and fused graph: `precision` may then
    be any of `PRECISIONS` and `recompute` any of `RECOMPUTE`. All others run the modules, in bf16, with recompute one
    of `RECOMPUTE_OF_MODULES`. balance: of experts; None does not even count how busy they are. max_length: of a
    sequence, see `build`. phases, before_update, records: see `ParallelStep`.

    Raises ValueError for what does not go together.
    """
    layout.check(config, mesh.world.size)
    check_trainable(config)
    _check(layout, precision, recompute)
    narrow = mesh.world.device.type == "cuda" and dtype == torch.float32
    with torch.device("meta"):
        whole, model = (build(config, max_length).to(dtype) for _ in range(2))
    hold_biases(model)
    balancing = make_balancing(config, balance, layout, mesh)
    setting = _Setting(config, layout, mesh, torch.bfloat16 if narrow else dtype, balancing)
    if layout.divides_documents_only:
        parallel, passes = _through_graph(model, setting, precision, recompute)
    else:
        recompute_modules(model, recompute)
        way = _through_stages if layout.pp > 1 else _through_modules
        parallel, passes = way(model, setting)
    shards = parallel.gradients.shards
    axes = gradient_axes(mesh, parallel.sharding, layout.zero)
    held = state_shards(shards, {}, parallel.sharding, axes) + balancing.state_shards()
    known = {(one.kind, one.name) for one in held}
    fill(held, values(whole, {name for name, _ in whole.named_parameters() if state_of(name) in known}))
    parallel.gradients.sync_weights()
    optimizer = make_optimizer(shards, optimizer_config, mesh, parallel.sharding)
    return ParallelStep(
        passes,
        parallel,
        optimizer,
        balancing,
        lambda: state_shards(shards, optimizer.state(), parallel.sharding, axes) + balancing.state_shards(),
        layout,
        mesh,
        clip=optimizer_config.clip,
        dtype=dtype,
        phases=phases,
        before_update=before_update,
        records=records,
    )


def _check(layout: Layout, precision: str, recompute: str) -> None:
    for name, choice, choices in (("precision", precision, PRECISIONS), ("recompute", recompute, RECOMPUTE)):
        if choice not in choices:
            raise ValueError(f"{name} = {choice!r} must be one of {', '.join(choices)}")
    if layout.divides_documents_only:
        return
    way = "is for layouts that divide documents only (dp, or shard with zero = 1 or 2)"
    if precision != "bf16":
        raise ValueError(f"precision = {precision!r} {way}; use such a layout, or 'bf16'")
    if recompute not in RECOMPUTE_OF_MODULES:
        raise ValueError(
            f"recompute = {recompute!r} {way}; use such a layout, or one of {', '.join(RECOMPUTE_OF_MODULES)}"
        )
    if recompute != "none" and layout.schedule.startswith("zero-bubble") and layout.pp > 1:
        raise ValueError(
            f"recompute = {recompute!r} does not go with schedule {layout.schedule!r}, which runs a backward pass in "
            f"two parts; use 'none', or schedule '1f1b' or 'interleaved'"
        )


@dataclass(frozen=True)
class _Setting:
    """What all ways to run a model need. compute_dtype: of the weights that it computes with."""

    config: ModelConfig
    layout: Layout
    mesh: Mesh
    compute_dtype: torch.dtype
    balancing: NoBalancing

    def divide(self, model: CausalLM | ModelStages) -> Parallel:
        parallel = parallelize(model, self.config, self.layout, self.mesh, compute_dtype=self.compute_dtype)
        self.balancing.attach(model)
        return parallel


def _through_graph(model: CausalLM, setting: _Setting, precision: str, recompute: str) -> tuple[Parallel, Passes]:
    mesh = setting.mesh
    if mesh.world.size == 1:
        sharding = shard_model(model, mesh.axis("tp"), TABLES[setting.config.architecture])
        alone = OneDeviceGradients(model, mesh.world.device, setting.compute_dtype)
        setting.balancing.attach(model)
        return Parallel(sharding, alone), GraphPasses(model, TrainingGraph(model, precision, recompute), alone)
    parallel = setting.divide(model)
    gradients = parallel.gradients
    assert isinstance(gradients, ZeroGradients)
    return parallel, GraphPasses(model, TrainingGraph(model, precision, recompute, gradients), gradients)


def _through_modules(model: CausalLM, setting: _Setting) -> tuple[Parallel, Passes]:
    parallel = setting.divide(model)
    return parallel, ModulePasses(model, parallel.gradients, parallel.sharding.axis, setting.config.vocab_size)


def _through_stages(model: CausalLM, setting: _Setting) -> tuple[Parallel, Passes]:
    layout, mesh = setting.layout, setting.mesh
    schedule = make_schedule(layout.schedule, layout.pp, layout.micro_batches)
    rotary = model.model.rotary
    assert rotary is not None  # without attention there are recurrent layers, of which there are no stages
    spans = layer_spans(model, schedule.stages, rotary.table.shape[0])
    stages = ModelStages(model, spans, schedule.stages_of(mesh.axis("pp").index))
    parallel = setting.divide(stages)
    pipeline = Pipeline(stages, schedule, mesh, sequence_parallel=layout.sequence_parallel)
    return parallel, PipelinePasses(pipeline, parallel.gradients)
