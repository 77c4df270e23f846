"""A training step of this rank, over any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from strata.comm.collectives import start_all_reduce
from strata.comm.mesh import Mesh
from strata.comm.to_device import to_device
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.parallel.loss import Head, MicroBatch
from strata.parallel.parallelize import Parallel
from strata.train.checkpoints.state import StateShard
from strata.train.data.pack import PackedBatch
from strata.train.optimizer.make import ShardedOptimizer
from strata.train.optimizer.sharded_optimizer import clip_scale
from strata.train.phases import PASSES, Phases
from strata.train.steps.balance import NoBalancing
from strata.train.steps.captured import CapturedStep, MakeBatches, Shape, fixed_shape, shape_of_all
from strata.train.steps.micro_batch import micro_batch, whole_batch
from strata.train.steps.objective import Columns, Objective
from strata.train.steps.passes import GraphPasses, Passes
from strata.train.steps.result import StepResult


class ParallelStep:
    """Trains a model step by step: passes over this rank's packs, the gradient's sum and norm over all ranks, the
    update. All ranks call the methods alike.

    The updated weights travel at the beginning of the next step, while its first layers compute. On a GPU, steps
    through a graph that recur in shape are captured: if all ranks had, in two steps in a row, equally many packs of
    equally many sequences of one same length. A step of another shape ends that, because it needs the memory; then it
    takes twice as many steps in a row. The host never waits for the device.
    """

    def __init__(
        self,
        passes: Passes,
        objective: Objective,
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
        captures: bool,
    ) -> None:
        """objective: what the steps minimize. state_shards: of masters and optimizer state. clip: the largest norm of
        the gradient of an update. dtype: of the loss. before_update: is called right before masters and state change.
        captures: whether steps that recur in shape are captured, where they can be. phases: is called at the phases of
        a step.
        """
        self._passes, self._gradients, self._balancing = passes, parallel.gradients, balancing
        self._objective, self._quantized = objective, parallel.quantized
        self._optimizer, self._shards = optimizer, state_shards
        self._clip, self._dtype, self._phases, self._before_update = clip, dtype, phases, before_update
        self._device = mesh.world.device
        self._context, self._pipeline = mesh.axis("cp"), mesh.axis("pp")
        self._to_micro_batch = partial(micro_batch, device=self._device, context=self._context, method=layout.context)
        self._documents = mesh.flattened("dp", "shard")
        self._tokens = mesh.flattened("dp", "shard", "cp")
        self._world_axis = all_ranks(mesh)
        self._captures = captures and self._device.type == "cuda" and isinstance(passes, GraphPasses)
        self._before: Shape | None = None
        self._in_a_row, self._wanted = 0, 2  # steps of the shape of the one before; those that it takes to capture
        self._captured: CapturedStep | None = None
        mesh.world.on_shutdown.append(self._forget_capture)

    def __call__(self, batches: Sequence[PackedBatch], rate: float) -> StepResult:
        """One step. batches: this rank's packs, as many on every rank, alike along "cp", "tp" and "pp"."""
        self._optimizer.begin(rate)
        shape = shape_of_all(fixed_shape(batches), self._world_axis) if self._captures else None
        before, self._before = self._before, shape
        self._in_a_row = self._in_a_row + 1 if self._before == before else 1
        captured = self._capture() if self._before is not None and self._in_a_row >= self._wanted else None
        if captured is not None:
            self._phases.at("replayed passes")
            shares, norm, counted = captured(batches, self._begin_update)
        else:
            self._forget_capture()
            shares, norm, counted = self._run(batches)
        named = self._named(shares)
        return StepResult(named.pop("loss"), norm, {"counted": counted, **named, **self._balancing.metrics()})

    @torch.no_grad()
    def measured(self, batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
        """What a step would say of these packs, by forward passes alone: nothing that a step changes changes. Call
        `sync_weights` before the first of several. batches: as for a step, but some of them may count nothing.

        Returns, alike on all ranks, [] each: "loss" and the objective's metrics, means over what counts, and "counted",
        how much that is; 0 leaves means of 0.
        """
        self._free_capture()
        counted, _ = start_all_reduce(self._own_counts(batches), self._documents).wait().unbind()
        scale = counted.clamp(min=1).reciprocal()
        made = [self._to_micro_batch(one, self._objective.columns(one), scale) for one in batches]
        shares = self._passes(made, self._objective)
        return {**self._named(start_all_reduce(shares, self._tokens).wait()), "counted": counted}

    @torch.no_grad()
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-probabilities of the targets of each of these packs, [targets] float32 (float64 for float64 weights) on
        the CPU, by forward passes alone, as for `measured`. Alike on the ranks along "cp", "tp" and "pp".
        """
        self._free_capture()
        counts = [len(one.targets) for one in batches]
        found = torch.zeros(sum(counts), dtype=self._dtype, device=self._device)
        numbers = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
        columns = [Columns({"numbers": one}) for one in numbers]
        scale = torch.ones((), dtype=self._dtype, device=self._device)
        made = [self._to_micro_batch(*one, scale) for one in zip(batches, columns, strict=True)]
        self._passes(made, _Logprobs(found))
        for axis in (self._context, self._pipeline):
            found = start_all_reduce(found, axis).wait()
        return list(found.cpu().split(counts))

    def state_shards(self) -> list[StateShard]:
        """What a checkpoint stores of this rank: the live memory of masters and optimizer state."""
        if self._quantized is not None:
            self._quantized.drop_errors()  # who goes on from here has none: so those who stay have none either
        return self._shards()

    def restored(self, steps: int) -> None:
        """Go on after `steps` steps from shards that were filled in place."""
        self._optimizer.restored(steps)
        self._gradients.all_gather_weights()

    def sync_weights(self) -> None:
        """Let the model compute with the weights of the last step, for whatever calls it outside of a step."""
        self._gradients.all_gather_weights()

    def _run(self, batches: Sequence[PackedBatch]) -> tuple[Tensor, Tensor, Tensor]:
        """Shares of all ranks, norm, and what the loss is a mean of."""
        found = self._reduced(partial(self._micro_batches, batches), self._own_counts(batches))
        self._begin_update()
        self._update(found[1])
        return found

    def _own_counts(self, batches: Sequence[PackedBatch]) -> Tensor:
        """[2] how much of these documents the loss is a mean of, and how many tokens there are."""
        counts = (sum(map(self._objective.count, batches)), sum(len(one.tokens) for one in batches))
        return to_device(torch.tensor(counts, dtype=self._dtype), self._device)

    def _micro_batches(self, batches: Sequence[PackedBatch], scale: Tensor) -> list[MicroBatch]:
        # What recurs as a CUDA graph does, so that a run that resumes, and has nothing captured yet, repeats the bits.
        make = self._to_micro_batch if self._before is None else partial(whole_batch, context=self._context)
        return [make(one, self._objective.columns(one), scale) for one in batches]

    def _named(self, shares: Tensor) -> dict[str, Tensor]:
        return dict(zip(("loss", *self._objective.metrics), shares.unbind(), strict=True))

    def _begin_update(self) -> None:
        self._phases.at("update")
        self._before_update()

    def _reduced(self, make: MakeBatches, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The passes over what `make` makes of the scale of losses, and the sums over all ranks.

        own: see `_own_counts`.
        """
        counted, tokens = start_all_reduce(own, self._documents).wait().unbind()
        self._balancing.begin(tokens)
        batches = make(counted.clamp(min=1).reciprocal())
        self._phases.at(PASSES)
        shares = self._passes(batches, self._objective)
        self._phases.at("reduce")
        self._gradients.reduce()
        norm = self._gradients.norm()
        self._balancing.reduce()
        return start_all_reduce(shares, self._tokens).wait(), norm, counted

    def _recurring(self, make: MakeBatches, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self._before is not None
        return self._reduced(make, torch.stack([own, torch.full_like(own, math.prod(self._before))]))

    def _update(self, norm: Tensor) -> None:
        self._optimizer.update(clip_scale(norm, self._clip))
        self._balancing.update(norm)

    def _capture(self) -> CapturedStep:
        """The captured step of the shape that recurs on all ranks."""
        assert self._before is not None
        assert isinstance(self._passes, GraphPasses)
        if self._captured is None:
            self._passes.free_gradients()  # the gradient of the step before, whose update has been launched
            torch.cuda.empty_cache()  # a CUDA graph has memory of its own
            self._captured = CapturedStep(
                self._before,
                self._objective,
                self._context,
                self._device,
                self._recurring,
                self._update,
                self._passes.free_gradients,
            )
        return self._captured

    def _forget_capture(self) -> None:
        """A step that is launched takes as much memory, which there may not be twice."""
        if self._captured is not None:
            self._free_capture()
            self._wanted *= 2

    def _free_capture(self) -> None:
        """The next step of its shape captures again."""
        if self._captured is not None:
            assert isinstance(self._passes, GraphPasses)
            self._captured = None
            self._passes.free_gradients()  # they lie in it
            torch.cuda.empty_cache()


class _Logprobs:
    """Keeps what others would make a loss of."""

    metrics: tuple[str, ...] = ()
    sums_cross_entropy: bool = False

    def __init__(self, found: Tensor) -> None:
        """found: [targets] of all packs, to be filled."""
        self._found = found

    def __call__(self, hidden: Tensor, head: Head, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        self._found[batch.columns["numbers"]] = -head.cross_entropy(hidden, batch.targets).to(self._found.dtype)
        return self._found.new_zeros(()), {}
