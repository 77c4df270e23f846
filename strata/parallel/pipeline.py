"""Runs the passes of a training step through the stages of a pipeline, in the order of any schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from strata.comm.collectives import PendingTransfers, Transfer, start_all_reduce, start_transfers
from strata.comm.mesh import Mesh
from strata.parallel.data_parallel import Gradients
from strata.parallel.families import span
from strata.parallel.loss import Head, Loss, MicroBatch, shares
from strata.parallel.schedules import Action, PipelineSchedule, StagePass, forward_alone
from strata.parallel.split_backward import WeightGradients, backward_of_inputs
from strata.parallel.stages import ModelStages
from strata.parallel.timeline import Exchange, programs


class Pipeline:
    """This rank's stages and its program. All ranks along "pp" make one of the same schedule, and call it together."""

    def __init__(
        self, model: ModelStages, schedule: PipelineSchedule, mesh: Mesh, *, sequence_parallel: bool = False
    ) -> None:
        """model: of this rank, already divided along "tp" if that axis has several ranks; then `sequence_parallel` says
        how. Raises ValueError if the schedule does not fit the axis or the model.
        """
        self.model, self.schedule = model, schedule
        self.axis, self.tensor_axis = mesh.axis("pp"), mesh.axis("tp")
        self.sequence_parallel = sequence_parallel
        if schedule.ranks != self.axis.size:
            raise ValueError(
                f"the schedule is for {schedule.ranks} ranks, but pp = {self.axis.size}; make it for those"
            )
        own = schedule.stages_of(self.axis.index)
        if model.own != own or model.stages != schedule.stages:
            raise ValueError(
                f"this rank holds the stages {model.own} of {model.stages}, but the schedule gives it {own}"
            )
        self.program = programs(schedule)[self.axis.index]
        self.forward_program = programs(forward_alone(schedule))[self.axis.index]
        # NCCL wants all ranks of a group in its first call; transfers are between two.
        start_all_reduce(torch.zeros((), device=mesh.world.device), self.axis).wait()

    def run(self, batches: Sequence[MicroBatch], loss: Loss, gradients: Gradients | None) -> Tensor:
        """Forward and backward of all micro-batches; `gradients` has this rank's share of the step's gradient after it,
        not yet reduced; None, where gradients are off, for the forward passes alone. All ranks along "pp" give the same
        batches.

        Returns the sum of these batches' `shares` of the loss, [1 + metrics] float32 (float64 for float64 weights),
        alike on all ranks along "pp"; does not wait for the device.
        """
        if len(batches) != self.schedule.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches, but the schedule is for {self.schedule.micro_batches}")
        step = _PipelineStep(self, batches, loss, gradients)
        for event in self.forward_program if gradients is None else self.program:
            if isinstance(event, Exchange):
                step.exchange(event)
            else:
                step.run(event)
        return step.finish()


@dataclass(frozen=True)
class _PendingExchange:
    """Transfers that have started. arriving: by what made them."""

    pending: PendingTransfers
    arriving: list[tuple[Action, Tensor]]


class _PipelineStep:
    """What a rank holds during one step; keys are (stage, micro-batch)."""

    def __init__(
        self, pipeline: Pipeline, batches: Sequence[MicroBatch], loss: Loss, gradients: Gradients | None
    ) -> None:
        self.pipeline, self.model, self.axis = pipeline, pipeline.model, pipeline.axis
        self.batches, self.loss, self.gradients = batches, loss, gradients
        # Adapters may be wider than what they are beside.
        weight = min(self.model.parameters(), key=Tensor.element_size)
        self.dtype, self.device = weight.dtype, weight.device
        wide = torch.promote_types(self.dtype, torch.float32)
        self.shares = torch.zeros(1 + len(loss.metrics), dtype=wide, device=self.device)
        self.hidden: dict[tuple[int, int], Tensor] = {}  # what a stage is given
        self.slopes: dict[tuple[int, int], Tensor] = {}  # the gradient of what it made
        self.graphs: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self.weights: dict[tuple[int, int], WeightGradients] = {}
        self.outbox: dict[Action, Tensor] = {}
        self.under_way: deque[_PendingExchange] = deque()
        self.embedding = _TiedEmbedding(pipeline, self.dtype, self.device)
        own = pipeline.schedule.actions[self.axis.index]
        self.passes_left = sum(action.kind.frees for action in own) + self.embedding.gets_gradient

    def run(self, action: Action) -> None:
        """One action, as soon as what it needs has arrived."""
        if action.kind is StagePass.FORWARD:
            self._forward(action)
        elif action.kind is StagePass.WEIGHTS:
            self._begin_weights()
            self.weights.pop((action.stage, action.micro_batch)).run()
            self._end_weights()
        else:
            self._backward(action)

    def exchange(self, exchange: Exchange) -> None:
        """Start transfers, all in one message to the communication library."""
        transfers, arriving = [], []
        for one in exchange.transfers:
            if one.source == self.axis.index:
                tensor = self.outbox.pop(one.made).contiguous()
            else:
                tensor = self._empty(one.made.micro_batch)
                arriving.append((one.made, tensor))
            transfers.append(Transfer(tensor, one.source, one.target))
        self.under_way.append(_PendingExchange(start_transfers(transfers, self.axis), arriving))

    def finish(self) -> Tensor:
        """Wait for what is still under way. Returns the shares."""
        while self.under_way:
            self._wait_for_next()
        if self.gradients is None:
            self.embedding.sent()
            return start_all_reduce(self.shares, self.axis).wait()
        if self.embedding.gets_gradient:
            self._begin_weights()
        self.embedding.send_gradient()
        if self.embedding.gets_gradient:
            self._end_weights()
        return start_all_reduce(self.shares, self.axis).wait()

    def _forward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        micro_batch = self.batches[action.micro_batch]
        hidden = self._arrived(self.hidden, key).requires_grad_() if action.stage > 0 else None
        output = self.model(micro_batch.batch, hidden, action.stage)
        if action.stage == self.model.stages - 1:
            found = self.loss(micro_batch.counted(output), self._head(), micro_batch)
            self.shares += shares(self.loss, found)
            output = found[0]
        else:
            self._hand_on(action, output.detach())
        if self.gradients is not None:
            # The edge keeps the graph, and not the output, which nobody needs after it was sent. There is none in front
            # of all that is trained.
            self.graphs[key] = hidden, get_gradient_edge(output) if output.requires_grad else None

    def _backward(self, action: Action) -> None:
        key = action.stage, action.micro_batch
        given, output = self.graphs.pop(key)
        is_last = action.stage == self.model.stages - 1
        slope = self.shares.new_ones(()) if is_last else self._arrived(self.slopes, key)
        if action.kind is StagePass.INPUTS and output is None:
            of_given, self.weights[key] = None, WeightGradients()
        elif action.kind is StagePass.INPUTS:
            assert output is not None
            of_given, self.weights[key] = backward_of_inputs(output, slope, given)
            if self.weights[key].has_begun:
                self._accumulate()
        else:
            self._begin_weights()
            if output is not None:
                torch.autograd.backward([output], [slope])
            self._end_weights()
            of_given = None if given is None else given.grad
        if of_given is not None:
            self._hand_on(action, of_given)

    def _head(self) -> Head:
        weight, axis = self.embedding.head_weight(), self.pipeline.tensor_axis
        return Head(weight, axis, self.model.vocab_size, loss_has_gradients=False)

    def _begin_weights(self) -> None:
        if self.passes_left == 1:
            assert self.gradients is not None
            self.gradients.set_is_last_backward()

    def _end_weights(self) -> None:
        self.passes_left -= 1
        self._accumulate()

    def _accumulate(self) -> None:
        assert self.gradients is not None
        self.embedding.accumulate()
        self.gradients.accumulate()

    def _hand_on(self, made: Action, tensor: Tensor) -> None:
        """To the stage that waits for it: on this rank at once, else with the exchange that follows."""
        to = made.stage + (1 if made.kind is StagePass.FORWARD else -1)
        if self.pipeline.schedule.rank_of_stage[to] == self.axis.index:
            self._deliver(made, tensor)
        else:
            self.outbox[made] = tensor

    def _deliver(self, made: Action, tensor: Tensor) -> None:
        if made.kind is StagePass.FORWARD:
            self.hidden[made.stage + 1, made.micro_batch] = tensor
        else:
            self.slopes[made.stage - 1, made.micro_batch] = tensor

    def _arrived(self, place: dict[tuple[int, int], Tensor], key: tuple[int, int]) -> Tensor:
        """Wait until it is there. Exchanges end in their order."""
        while key not in place:
            self._wait_for_next()
        return place.pop(key)

    def _wait_for_next(self) -> None:
        first = self.under_way.popleft()
        first.pending.wait()
        for made, tensor in first.arriving:
            self._deliver(made, tensor)

    def _empty(self, micro_batch: int) -> Tensor:
        """For the hidden states of a micro-batch or their gradient, as they go from rank to rank."""
        tokens = self.batches[micro_batch].batch.tokens.shape[0]
        parts = self.pipeline.tensor_axis.size if self.pipeline.sequence_parallel else 1
        return torch.empty(-(-tokens // parts), self.model.hidden_size, dtype=self.dtype, device=self.device)


class _TiedEmbedding:
    """The weight of the head. When it is the embedding's and the first rank along the pipeline is not the one with the
    last stage, the first sends it at each step and, if it is trained, receives its gradient: it is a parameter of one
    rank alone.
    """

    def __init__(self, pipeline: Pipeline, dtype: torch.dtype, device: torch.device) -> None:
        model, axis, rank_of_stage = pipeline.model, pipeline.axis, pipeline.schedule.rank_of_stage
        self.model, self.axis, self.first, self.last = model, axis, rank_of_stage[0], rank_of_stage[-1]
        owns_embedding = model.is_tied and 0 in model.own and rank_of_stage[0] != rank_of_stage[-1]
        self.gets_gradient = owns_embedding and model.trains_embedding
        self.under_way: list[PendingTransfers] = []
        if model.shares_embedding:
            first, end = span(model.vocab_size, pipeline.tensor_axis.size, pipeline.tensor_axis.index)
            self.received = torch.empty(end - first, model.hidden_size, dtype=dtype, device=device)
            # Sums over micro-batches are kept wide.
            self.gradient = torch.zeros_like(self.received, dtype=torch.promote_types(dtype, torch.float32))
            self._transfer(self.received, self.first, self.last)
            self.received.requires_grad_(model.trains_embedding)
        if owns_embedding:
            self._transfer(self._embedding().detach().contiguous(), self.first, self.last)

    def head_weight(self) -> Tensor:
        """[this rank's rows of the vocabulary, hidden]."""
        if not self.model.shares_embedding:
            return self._embedding() if self.model.lm_head is None else self.model.lm_head.weight
        self._wait()
        return self.received

    def sent(self) -> None:
        """Wait until the weight has travelled."""
        self._wait()

    def accumulate(self) -> None:
        """Take the gradient that a backward pass left on a received embedding."""
        if self.model.shares_embedding and self.received.grad is not None:
            self.gradient += self.received.grad
            self.received.grad = None

    def send_gradient(self) -> None:
        """The gradient of the received embedding to its owner, where it arrives as that of a pass of its own."""
        self._wait()
        if self.model.shares_embedding and self.model.trains_embedding:
            self._transfer(self.gradient, self.last, self.first)
            self._wait()
        if self.gets_gradient:
            weight = self._embedding()
            gradient = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            self._transfer(gradient, self.last, self.first)
            self._wait()
            torch.autograd.backward([weight], [gradient.to(weight.dtype)])

    def _embedding(self) -> Tensor:
        assert self.model.model.embed_tokens is not None
        return self.model.model.embed_tokens.weight

    def _transfer(self, tensor: Tensor, source: int, target: int) -> None:
        self.under_way.append(start_transfers([Transfer(tensor, source, target)], self.axis))

    def _wait(self) -> None:
        for pending in self.under_way:
            pending.wait()
        self.under_way.clear()
