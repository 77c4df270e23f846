"""A step of fine-tuning with any objective, on ranks that each hold the whole model: LoRA, DPO."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from strata.comm.collectives import start_all_reduce
from strata.comm.mesh import Mesh
from strata.comm.placement import Placement
from strata.comm.to_device import to_device
from strata.models.balance import routers
from strata.models.layers import CausalLM
from strata.parallel.data_parallel import all_ranks, gradient_axes
from strata.parallel.layout import Layout
from strata.parallel.tensor import TensorSharding
from strata.parallel.zero import ZeroGradients
from strata.train.checkpoints.state import StateShard, bias_shards, state_shards
from strata.train.data.pack import PackedBatch
from strata.train.optimizer.clip import clip_scale
from strata.train.optimizer.config import OptimizerConfig
from strata.train.optimizer.make import make_optimizer
from strata.train.phases import NO_PHASES, PASSES, Phases
from strata.train.steps.objective import Objective
from strata.train.steps.result import StepResult


class TuneStep:
    """`Stepper` that changes `trained` so that `objective` over `model` falls."""

    def __init__(
        self,
        model: CausalLM,
        trained: nn.Module,
        objective: Objective,
        config: OptimizerConfig,
        layout: Layout,
        mesh: Mesh,
        *,
        compute_dtype: torch.dtype | None = None,
        phases: Phases = NO_PHASES,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        """trained: the module whose parameters change, `model` or what was put into it, in float32 and alike on all
        ranks. layout: of the mesh, with documents divided and nothing else: gradients and optimizer state may be.
        compute_dtype: of the trained parameters from now on; None leaves it. phases, before_update: see
        `ParallelStep`.
        """
        self.model, self._objective, self._clip = model, objective, config.clip
        self._phases, self._before_update = phases, before_update
        self._device = mesh.world.device
        self._documents, self._is_main = mesh.flattened("dp", "shard"), mesh.world.is_main
        shapes = {name: tuple(parameter.shape) for name, parameter in trained.named_parameters()}
        whole = dict.fromkeys(shapes, Placement.PER_TOKEN)
        self._sharding = TensorSharding(mesh.axis("tp"), False, whole, shapes)
        self._axes = gradient_axes(mesh, self._sharding, layout.zero)
        self._gradients = ZeroGradients(
            trained,
            self._axes,
            all_ranks(mesh),
            self._device,
            reduce_every_pass=layout.zero == 2,
            compute_dtype=compute_dtype,
        )
        self._optimizer = make_optimizer(self._gradients.shards, config, mesh, self._sharding)

    def __call__(self, batches: Sequence[PackedBatch], rate: float) -> StepResult:
        counted = self._counted(batches)
        self._phases.at(PASSES)
        totals = self._passes(batches, counted)
        self._phases.at("reduce")
        named = self._means(totals, counted)
        return StepResult(named.pop("loss"), self._update(rate), named | {"counted": counted})

    @torch.no_grad()
    def measured(self, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
        counted = self._counted(batches)
        # Ranks meet after their passes alone, so that they need not have equally many.
        totals = self._passes([one for one in batches if self._objective.count(one)], counted)
        return self._means(totals, counted.clamp(min=1)) | {"counted": counted}

    def state_shards(self) -> list[StateShard]:
        biases = {
            name: router.selection_bias
            for name, router in routers(self.model).items()
            if router.selection_bias is not None
        }
        trained = state_shards(self._gradients.shards, self._optimizer.state(), self._sharding, self._axes)
        return trained + bias_shards(biases, self._is_main)

    def restored(self, steps: int) -> None:
        self._optimizer.restored(steps)
        self._gradients.all_gather_weights()

    def sync_weights(self) -> None:
        self._gradients.all_gather_weights()

    def _counted(self, batches: Sequence[PackedBatch]) -> Tensor:
        own = to_device(torch.tensor(float(sum(map(self._objective.count, batches)))), self._device)
        return start_all_reduce(own, self._documents).wait()

    def _passes(self, batches: Sequence[PackedBatch], counted: Tensor) -> dict[str, Tensor]:
        """The sums over this rank's packs, [] each; where gradients are on, theirs too."""
        totals = {name: torch.zeros_like(counted) for name in ("loss", *self._objective.metrics)}
        for packed in batches:
            total, sums = self._objective(self.model, packed)
            if torch.is_grad_enabled():
                if packed is batches[-1]:
                    self._gradients.set_is_last_backward()
                (total / counted).backward()
                self._gradients.accumulate()
            for name, one in {"loss": total, **sums}.items():
                totals[name] = totals[name] + one.detach()
        return totals

    def _means(self, totals: dict[str, Tensor], counted: Tensor) -> dict[str, Tensor]:
        means = start_all_reduce(torch.stack(list(totals.values())), self._documents).wait() / counted
        return dict(zip(totals, means.unbind(), strict=True))

    def _update(self, rate: float) -> Tensor:
        self._gradients.reduce()
        norm = self._gradients.norm()
        self._phases.at("update")
        self._before_update()
        self._optimizer.begin(rate)
        self._optimizer.update(clip_scale(norm, self._clip))
        self._gradients.all_gather_weights()
        return norm
