"""From a model's config, a layout and first values to this rank's training step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from strata.comm.mesh import Mesh
from strata.kernels.quant.quantized import QuantizedWeight
from strata.models.balance import hold_biases
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.initialize import dummy_values, initial_values
from strata.models.layers import CausalLM
from strata.models.quantized.checkpoint import Checkpoint
from strata.models.quantized.choice import hold_quantized
from strata.parallel.data_parallel import gradient_axes
from strata.parallel.families import sharding_table
from strata.parallel.layout import Layout
from strata.parallel.parallelize import Adapt, Parallel, parallelize
from strata.parallel.pipeline import Pipeline
from strata.parallel.schedules import make_schedule
from strata.parallel.stages import ModelStages, layer_spans
from strata.parallel.tensor import shard_model
from strata.parallel.zero import ZeroGradients
from strata.train.adapters.lora import LoraConfig, add_adapters, first_values
from strata.train.checkpoints.state import StateShard, fill, state_of, state_shards
from strata.train.compile import TrainingGraph
from strata.train.config import PRECISIONS, RECOMPUTE, RECOMPUTE_OF_MODULES, BalanceConfig, check_trainable
from strata.train.layout import check_quantized
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.make import make_optimizer
from strata.train.phases import NO_PHASES, Phases
from strata.train.recompute import recompute_modules
from strata.train.steps.balance import NoBalancing, make_balancing
from strata.train.steps.objective import NextToken, Objective
from strata.train.steps.one_device import OneDeviceGradients
from strata.train.steps.parallel_step import ParallelStep
from strata.train.steps.passes import GraphPasses, ModulePasses, Passes, PipelinePasses

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


def values_of(model: nn.Module) -> Values:
    """Those that a model has, from the host, so that its device need not hold them twice."""
    named = {name: one.detach().cpu() for name, one in model.named_parameters() if not one.is_meta}
    return lambda _, wanted: ((name, one) for name, one in named.items() if name in wanted)


@dataclass(frozen=True)
class Adapters:
    """What trains beside a frozen model instead of it. seed: of first values. packed: the weights that the model holds
    packed, by the names of the parameters that they stand for, whole and on the device.
    """

    lora: LoraConfig
    seed: int = 0
    packed: Mapping[str, QuantizedWeight] = field(default_factory=dict)


def make_step(
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    optimizer_config: OptimizerConfig,
    values: Values,
    *,
    objective: Objective | None = None,
    adapters: Adapters | None = None,
    precision: str = "bf16",
    recompute: str = "none",
    balance: BalanceConfig | None = None,
    phases: Phases = NO_PHASES,
    before_update: Callable[[], None] = lambda: None,
    max_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    captures: bool = True,
) -> ParallelStep:
    """This rank's step of a run. A collective call.

    layout: that of the mesh; checked here. The model begins on the meta device and is filled parameter by parameter, so
    no rank holds more of it than its layout says. It computes in bfloat16 on a GPU, and in `dtype`, that of masters and
    optimizer state, on a CPU.

    objective: None is `NextToken`. adapters: None trains the whole model.

    A layout that divides documents only, with ZeRO of at most 2, runs the merged and fused graph: `precision` may then
    be any of `PRECISIONS` and `recompute` any of `RECOMPUTE`. All others, and models with adapters, run the modules, in
    bf16, with recompute one of `RECOMPUTE_OF_MODULES`. balance: of experts; None does not even count how busy they are.
    max_length: of a sequence, see `build`. phases, before_update, captures: see `ParallelStep`.

    Raises ValueError for what does not go together.
    """
    layout.check(config, mesh.world.size)
    check_trainable(config)
    runs_graph = layout.divides_documents_only and adapters is None
    _check(layout, precision, recompute, runs_graph=runs_graph)
    compute_dtype = compute_dtype_on(mesh.world.device, dtype)
    with torch.device("meta"):
        whole, model = (build(config, max_length).to(dtype) for _ in range(2))
    hold_biases(model)
    if adapters is not None:
        if adapters.packed:
            check_quantized(layout)
        model.requires_grad_(False).to(compute_dtype)
        hold_quantized(model, adapters.packed)
    balancing = make_balancing(config, balance, layout, mesh)
    setting = _Setting(config, layout, mesh, dtype, compute_dtype, balancing, adapters)
    if runs_graph:
        parallel, passes = _through_graph(model, setting, precision, recompute)
    else:
        recompute_modules(model, recompute)
        parallel, passes = (_through_stages if layout.pp > 1 else _through_modules)(model, whole, setting)
    shards = parallel.gradients.shards
    axes = gradient_axes(mesh, parallel.sharding, layout.zero)
    filled = state_shards([*shards, *parallel.gradients.frozen], {}, parallel.sharding, axes) + balancing.state_shards()
    known = {(one.kind, one.name) for one in filled}
    given = values(whole, {name for name, _ in whole.named_parameters() if state_of(name) in known})
    if adapters is not None:
        given = chain(given, first_values(whole, adapters.lora, adapters.seed))
    fill(filled, given)
    parallel.gradients.sync_weights()

    def state() -> list[StateShard]:
        biases = [] if adapters is not None else balancing.state_shards()  # which adapters leave as they are
        return state_shards(shards, optimizer.state(), parallel.sharding, axes) + biases

    optimizer = make_optimizer(shards, optimizer_config, mesh, parallel.sharding)
    return ParallelStep(
        passes,
        objective or NextToken(),
        parallel,
        optimizer,
        balancing,
        state,
        layout,
        mesh,
        clip=optimizer_config.clip,
        dtype=dtype,
        phases=phases,
        before_update=before_update,
        captures=captures,
    )


def compute_dtype_on(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """Of the weights that a model computes with, whose masters have `dtype`."""
    return torch.bfloat16 if device.type == "cuda" and dtype == torch.float32 else dtype


def _check(layout: Layout, precision: str, recompute: str, *, runs_graph: bool) -> None:
    for name, choice, choices in (("precision", precision, PRECISIONS), ("recompute", recompute, RECOMPUTE)):
        if choice not in choices:
            raise ValueError(f"{name} = {choice!r} must be one of {', '.join(choices)}")
    if runs_graph:
        return
    way = "is for layouts that divide documents only (dp, or shard with zero = 1 or 2), without adapters"
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
    """What all ways to run a model need. dtype: of masters. compute_dtype: of the weights that it computes with."""

    config: ModelConfig
    layout: Layout
    mesh: Mesh
    dtype: torch.dtype
    compute_dtype: torch.dtype
    balancing: NoBalancing
    adapters: Adapters | None

    def divide(self, model: CausalLM | ModelStages) -> Parallel:
        adapt: Adapt | None = None
        compute_dtype: torch.dtype | None = self.compute_dtype
        if self.adapters is not None:  # which compute as they are, wider than what they are beside
            adapt, compute_dtype = partial(add_adapters, config=self.adapters.lora, dtype=self.dtype), None
        parallel = parallelize(model, self.config, self.layout, self.mesh, adapt=adapt, compute_dtype=compute_dtype)
        self.balancing.attach(model)
        return parallel


def _through_graph(model: CausalLM, setting: _Setting, precision: str, recompute: str) -> tuple[Parallel, Passes]:
    mesh, vocab_size = setting.mesh, setting.config.vocab_size
    if mesh.world.size == 1:
        sharding = shard_model(model, mesh.axis("tp"), sharding_table(setting.config.architecture))
        alone = OneDeviceGradients(model, mesh.world.device, setting.compute_dtype)
        setting.balancing.attach(model)
        graph = TrainingGraph(model, precision, recompute)
        return Parallel(sharding, alone), GraphPasses(model, graph, alone, mesh.axis("tp"), vocab_size)
    parallel = setting.divide(model)
    gradients = parallel.gradients
    assert isinstance(gradients, ZeroGradients)
    graph = TrainingGraph(model, precision, recompute, gradients)
    return parallel, GraphPasses(model, graph, gradients, mesh.axis("tp"), vocab_size)


def _through_modules(model: CausalLM, whole: CausalLM, setting: _Setting) -> tuple[Parallel, Passes]:
    parallel = setting.divide(model)
    return parallel, ModulePasses(model, parallel.gradients, parallel.sharding.axis, setting.config.vocab_size)


def _through_stages(model: CausalLM, whole: CausalLM, setting: _Setting) -> tuple[Parallel, Passes]:
    """whole: the model with all its parameters, which costs are counted of."""
    layout, mesh = setting.layout, setting.mesh
    schedule = make_schedule(layout.schedule, layout.pp, layout.micro_batches)
    rotary = model.model.rotary
    assert rotary is not None  # without attention there are recurrent layers, of which there are no stages
    spans = layer_spans(whole, schedule.stages, rotary.table.shape[0])
    stages = ModelStages(model, spans, schedule.stages_of(mesh.axis("pp").index))
    parallel = setting.divide(stages)
    pipeline = Pipeline(stages, schedule, mesh, sequence_parallel=layout.sequence_parallel)
    return parallel, PipelinePasses(pipeline, parallel.gradients)
