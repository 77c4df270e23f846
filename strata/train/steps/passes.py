"""Forward and backward passes over a rank's packs, for every kind of layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strata.comm.mesh import Axis
from strata.kernels.loss.loss import CHUNK_BYTES, cross_entropy_gradients
from strata.models.batch import Batch
from strata.models.layers import CausalLM
from strata.parallel.data_parallel import Gradients
from strata.parallel.loss import Head, Loss, MicroBatch, shares
from strata.parallel.pipeline import Pipeline
from strata.parallel.zero import ZeroGradients
from strata.train.compile import TrainingGraph
from strata.train.steps.one_device import OneDeviceGradients

# What the logits that exist at once may take on one GPU, where sums over chunks would need memory of their own: all of
# 16384 tokens of a vocabulary of 128256 in bfloat16.
LOGITS_BYTES = 5 * 2**30
# Of a model that every rank holds whole; they take those of merged matrices.
GraphGradients = OneDeviceGradients | ZeroGradients


class ModulePasses:
    """Through the model as it is, however `parallelize` has divided it.

    Passes compute with the weights of the last update and leave a rank's share of the step's gradient with its
    `Gradients`, not yet reduced. Where gradients are off (`torch.no_grad`) these are forward passes alone, with the
    weights that are there, and nothing is left.
    """

    def __init__(self, model: CausalLM, gradients: Gradients, tensor_axis: Axis, vocab_size: int) -> None:
        self._model, self._gradients = model, gradients
        self._tensor_axis, self._vocab_size = tensor_axis, vocab_size

    def __call__(self, batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        """Returns the sum of these batches' `shares` of the loss, [1 + metrics], alike on all ranks along "tp" and
        "pp".
        """
        trains = torch.is_grad_enabled()
        if trains:
            self._gather_weights()
        total = batches[0].scale.new_zeros(1 + len(loss.metrics))
        for one in batches:
            if trains and one is batches[-1]:
                self._gradients.set_is_last_backward()
            total += self._pass(one, loss)
        return total

    def _pass(self, one: MicroBatch, loss: Loss) -> Tensor:
        """The shares of a batch, and its backward pass where gradients are on. Nothing of it is left to the next."""
        hidden = one.counted(self._hidden(one.batch))
        # Read after the forward pass, which gathers it where weights are divided.
        return self._shares(hidden, head_weight(self._model), one, loss)

    def _gather_weights(self) -> None:
        self._gradients.all_gather_weights()

    def _hidden(self, batch: Batch) -> Tensor:
        return self._model(batch)  # type: ignore[no-any-return]

    def _shares(self, hidden: Tensor, head: Tensor, one: MicroBatch, loss: Loss) -> Tensor:
        found = loss(hidden, Head(head, self._tensor_axis, self._vocab_size), one)
        if torch.is_grad_enabled():
            found[0].backward()
            self._gradients.accumulate()
        return shares(loss, found)


class PipelinePasses:
    """Through the stages of a pipeline; the packs are its micro-batches."""

    def __init__(self, pipeline: Pipeline, gradients: Gradients) -> None:
        self._pipeline, self._gradients = pipeline, gradients

    def __call__(self, batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        if not torch.is_grad_enabled():
            return self._pipeline.run(batches, loss, None)
        self._gradients.all_gather_weights()
        return self._pipeline.run(batches, loss, self._gradients)


class GraphPasses(ModulePasses):
    """Through the merged and fused graph of a model that every rank holds whole."""

    _gradients: GraphGradients

    def __init__(
        self,
        model: CausalLM,
        graph: TrainingGraph,
        gradients: GraphGradients,
        tensor_axis: Axis,
        vocab_size: int,
    ) -> None:
        super().__init__(model, gradients, tensor_axis, vocab_size)
        self._graph = graph
        for whole, parameters in graph.merged:
            gradients.watch(whole, parameters)
        self.free_gradients = gradients.free_gradients

    def _gather_weights(self) -> None:
        self._gradients.start_all_gather_weights()

    def _hidden(self, batch: Batch) -> Tensor:
        hidden = self._graph(batch)
        self._gradients.wait()  # for the head, which is not in the graph
        return hidden

    def _shares(self, hidden: Tensor, head: Tensor, one: MicroBatch, loss: Loss) -> Tensor:
        if not (torch.is_grad_enabled() and loss.sums_cross_entropy):
            return super()._shares(hidden, head, one, loss)
        # The gradients of the targets' cross-entropies come with them: the head's logits are not computed again.
        place = self._gradients.memory(head)
        logits_bytes = LOGITS_BYTES if place is None else CHUNK_BYTES
        total: Tensor
        total, of_hidden, of_head = cross_entropy_gradients(
            hidden.detach(), head.detach(), one.targets, one.scale, logits_bytes, place
        )
        if place is None:
            head.grad = of_head
        elif self._model.lm_head is not None:  # the backward pass adds to that of a tied one
            self._gradients.written(head)
        hidden.backward(of_hidden)
        self._gradients.accumulate()
        return total


Passes = ModulePasses | PipelinePasses


def head_weight(model: CausalLM) -> Tensor:
    """[vocab, hidden]: the head's own matrix, or the embedding's when they are tied."""
    return model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
