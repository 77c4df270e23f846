"""A training step of this rank, over any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from strata.comm.collectives import start_all_reduce
from strata.comm.mesh import Mesh
from strata.comm.to_device import to_device
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.parallel.parallelize import Parallel
from strata.train.checkpoints.state import StateShard
from strata.train.data.pack import PackedBatch
from strata.train.optimizer.clip import clip_scale
from strata.train.optimizer.sharded_optimizer import ShardedOptimizer
from strata.train.phases import PASSES, Phases
from strata.train.steps.balance import NoBalancing
from strata.train.steps.micro_batch import WholeBatch, micro_batch, whole_batch
from strata.train.steps.passes import GraphPasses, Passes
from strata.train.steps.recorded import RecordedStep, Shape, fixed_shape, shape_of_all
from strata.train.steps.result import StepResult


class ParallelStep:
    """A `Stepper`: passes over this rank's packs, the gradient's sum and norm over all ranks, the update.

    The updated weights travel at the beginning of the next step, while its first layers compute. On a GPU, steps
    through a graph that recur in shape are recorded: if all ranks had, in two steps in a row, equally many packs of
    equally many sequences of one same length. A step of another shape ends that, because it needs the memory; then it
    takes twice as many steps in a row. The host never waits for the device.
    """

    def __init__(
        self,
        passes: Passes,
        parallel: Parallel,
        optimizer: ShardedOptimizer,
        balancing: NoBalancing,
        state_shards: Callable[[], list[StateShard]],
        layout: Layout,
        mesh: Mesh,
        *,
        clip: float,
        dtype: torch.dtype,
        phases: Phases,
        before_update: Callable[[], None],
        records: bool,
    ) -> None:
        """state_shards: of masters and optimizer state. clip: the largest norm of the gradient of an
        update. dtype: of the loss. before_update: is called right before masters and state change. records: whether
        steps that recur in shape are recorded, where they can be. phases: is called at the phases of a step.
        """
        self._passes, self._gradients, self._balancing = passes, parallel.gradients, balancing
        self._optimizer, self._shards = optimizer, state_shards
        self._clip, self._dtype, self._phases, self._before_update = clip, dtype, phases, before_update
        self._device = mesh.world.device
        self._to_micro_batch = partial(micro_batch, device=self._device, context=mesh.axis("cp"), method=layout.context)
        self._documents = mesh.flattened("dp", "shard")
        self._tokens = mesh.flattened("dp", "shard", "cp")
        self._world_axis = all_ranks(mesh)
        self._records = records and self._device.type == "cuda" and isinstance(passes, GraphPasses)
        self._before: Shape | None = None
        self._in_a_row, self._wanted = 0, 2  # steps of the shape of the one before; those that it takes to record
        self._recorded: RecordedStep | None = None
        mesh.world.on_shutdown.append(self._forget_recording)

    def __call__(self, batches: Sequence[PackedBatch], rate: float) -> StepResult:
        self._optimizer.begin(rate)
        shape = shape_of_all(fixed_shape(batches), self._world_axis) if self._records else None
        before, self._before = self._before, shape
        self._in_a_row = self._in_a_row + 1 if self._before == before else 1
        recorded = self._recording() if self._before is not None and self._in_a_row >= self._wanted else None
        if recorded is not None:
            self._phases.at("replayed passes")
            loss, norm, counted = recorded(batches, self._begin_update)
        else:
            self._forget_recording()
            loss, norm, counted = self._run(batches)
        return StepResult(loss, norm, {"counted": counted, **self._balancing.metrics()})

    @torch.no_grad()
    def measured(self, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
        self._free_recording()
        counted, _ = start_all_reduce(self._own_counts(batches), self._documents).wait().unbind()
        share = self._passes([self._to_micro_batch(one) for one in batches], counted.clamp(min=1))
        return {"loss": start_all_reduce(share, self._tokens).wait(), "counted": counted}

    def state_shards(self) -> list[StateShard]:
        return self._shards()

    def restored(self, steps: int) -> None:
        self._optimizer.restored(steps)
        self._gradients.all_gather_weights()

    def sync_weights(self) -> None:
        self._gradients.all_gather_weights()

    def _run(self, batches: Sequence[PackedBatch]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, norm and number of counted tokens."""
        found = self._reduced(self._passes_over(batches), self._own_counts(batches))
        self._begin_update()
        self._update(found[1])
        return found

    def _own_counts(self, batches: Sequence[PackedBatch]) -> Tensor:
        """[2] how many tokens of these documents count, and how many there are."""
        counts = (sum(len(one.targets) for one in batches), sum(len(one.tokens) for one in batches))
        return to_device(torch.tensor(counts, dtype=self._dtype), self._device)

    def _passes_over(self, batches: Sequence[PackedBatch]) -> Callable[[Tensor], Tensor]:
        if self._before is None:
            return partial(self._passes, [self._to_micro_batch(one) for one in batches])
        # As a recording computes, so that a run that resumes, and has nothing recorded yet, repeats the bits.
        assert isinstance(self._passes, GraphPasses)
        return partial(self._passes.over_all, [whole_batch(one, self._device) for one in batches])

    def _begin_update(self) -> None:
        self._phases.at("update")
        self._before_update()

    def _reduced(self, run: Callable[[Tensor], Tensor], own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The passes of `run`, which is given how many tokens all ranks count, and the sums over all ranks.

        own: see `_own_counts`.
        """
        counted, tokens = start_all_reduce(own, self._documents).wait().unbind()
        self._balancing.begin(tokens)
        self._phases.at(PASSES)
        share = run(counted.clamp(min=1))
        self._phases.at("reduce")
        self._gradients.reduce()
        norm = self._gradients.norm()
        self._balancing.reduce()
        return start_all_reduce(share, self._tokens).wait(), norm, counted

    def _over_all(self, batches: Sequence[WholeBatch], own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self._passes, GraphPasses)
        tokens = sum(len(batch.tokens) for batch, _ in batches)
        return self._reduced(partial(self._passes.over_all, batches), torch.stack([own, torch.full_like(own, tokens)]))

    def _update(self, norm: Tensor) -> None:
        self._optimizer.update(clip_scale(norm, self._clip))
        self._balancing.update(norm)

    def _recording(self) -> RecordedStep:
        """The recorded step of the shape that recurs on all ranks."""
        assert self._before is not None
        assert isinstance(self._passes, GraphPasses)
        if self._recorded is None:
            self._passes.free_gradients()  # the gradient of the step before, whose update has been launched
            torch.cuda.empty_cache()  # a recording has memory of its own
            self._recorded = RecordedStep(
                self._before, self._device, self._over_all, self._update, self._passes.free_gradients
            )
        return self._recorded

    def _forget_recording(self) -> None:
        """A step that is launched takes as much memory, which there may not be twice."""
        if self._recorded is not None:
            self._free_recording()
            self._wanted *= 2

    def _free_recording(self) -> None:
        """The next step of its shape records again."""
        if self._recorded is not None:
            assert isinstance(self._passes, GraphPasses)
            self._recorded = None
            self._passes.free_gradients()  # they lie in it
            torch.cuda.empty_cache()
