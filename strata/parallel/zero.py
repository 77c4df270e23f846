"""Data parallelism in buckets: plain, and ZeRO stages 1 and 2 (Rajbhandari et al. 2020).

The ranks sum a bucket while the backward pass goes on with the layers before it. A rank keeps master weights and
optimizer state for its shard of each bucket (all of it without ZeRO), and the updated shards are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from strata.comm.mesh import Axis
from strata.kernels.gradient_target import Memory
from strata.parallel.buckets import BUCKET_ELEMENTS, Bucket, divide_into_buckets
from strata.parallel.data_parallel import GradientAxes, ParameterShard, frozen_shards, global_norm
from strata.parallel.quantized_sums import QuantizedSums


class ZeroGradients:
    """`Gradients` of a model of which every rank computes with all weights (of its shard along other axes)."""

    shards: Sequence[ParameterShard]
    frozen: Sequence[ParameterShard]

    def __init__(
        self,
        model: nn.Module,
        axes: Mapping[str, GradientAxes],
        world_axis: Axis,
        device: torch.device,
        *,
        reduce_every_pass: bool,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
        quantized: QuantizedSums | None = None,
    ) -> None:
        """Divide the trained parameters of `model`, which become views of flat memory; the others stay as they are.

        model: alike on all ranks that `axes` (see `gradient_axes`) sums over; its trained parameters, in float32 or
        more, are what the masters begin with. On the meta device it has no values, and gets memory on `device`.
        world_axis: see `all_ranks`.
        reduce_every_pass: ZeRO-2, which keeps no more than a shard of the gradient between two micro-batches; otherwise
        a rank adds its gradients up and reduces them once a step.
        compute_dtype: of the model from now on; None leaves it. reduce_dtype: of gradients while they are added up and
        sent; None is float32, or the parameters' dtype if that is wider.
        bucket_elements: the least number in a message, unless all are fewer; a message never ends within a layer.
        quantized: what sums over ranks in 8 bits.
        """
        leave_meta(model, device)
        self.frozen = frozen_shards(model)
        self._world_axis, self._reduces_every_pass = world_axis, reduce_every_pass
        wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)  # of masters, which may be elsewhere
        self._zero = torch.zeros((), dtype=wide, device=device)
        self._buckets = _make_buckets(model, axes, compute_dtype, reduce_dtype, bucket_elements, quantized)
        self.shards = [shard for bucket in self._buckets for shard in bucket.shards]
        self._bucket_of = {name: place for place, bucket in enumerate(self._buckets) for name in bucket.entries}
        self._missing = [set(bucket.entries) for bucket in self._buckets]
        self._sent = 0
        self._reduces_this_pass = reduce_every_pass
        self._is_reduced = False
        self._under_way: list[Iterator[None]] = []
        # The parameters that each tensor is to which autograd gives a gradient.
        self._leaves: dict[Tensor, list[str]] = {
            parameter: [name] for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        for parameter in self._leaves:
            parameter.register_post_accumulate_grad_hook(self.take)

    def watch(self, leaf: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradient of `leaf` as soon as autograd has it: of a matrix that is a view of several parameters of
        the model, which lie side by side (`strata.graph.merge`). Every parameter is watched already.
        """
        names = [name for parameter in parameters for name in self._leaves[parameter]]
        entries = [self._buckets[self._bucket_of[name]].entries[name] for name in names]
        for before, after in pairwise(entries):
            if before.end != after.first or self._bucket_of[before.name] != self._bucket_of[after.name]:
                raise ValueError(f"{before.name} and {after.name} do not lie side by side; merge other parameters")
        self._leaves[leaf] = names
        leaf.register_post_accumulate_grad_hook(self.take)

    def take(self, leaf: Tensor) -> None:
        """The gradient that autograd has made of a watched tensor, if it has: it is complete for this pass."""
        if leaf.grad is None:
            return
        names = self._leaves[leaf]
        self._open_bucket(names).accumulate(names, leaf.grad)
        leaf.grad = None
        self._mark_ready(names)

    def target(self, leaf: Tensor) -> LeafGradientTarget:
        """For the gradient of a watched tensor that a backward pass writes itself (`strata.kernels.linear.into`)."""
        return LeafGradientTarget(self, leaf)

    def memory(self, leaf: Tensor) -> Memory:
        """Memory for the gradient of a watched tensor, in its shape, and whether it holds one already."""
        names = self._leaves[leaf]
        place, is_held = self._open_bucket(names).memory(names)
        return place.view(leaf.shape), is_held

    def written(self, leaf: Tensor) -> None:
        """The gradient of this pass is in that memory."""
        self._mark_ready(self._leaves[leaf])

    def _open_bucket(self, names: Sequence[str]) -> Bucket:
        """That of these parameters, which has not been sent in this pass."""
        place = self._bucket_of[names[0]]
        self._end_earlier_passes()
        if place < self._sent:
            raise RuntimeError(f"a second gradient of {names[0]} came after the first was sent; use the parameter once")
        return self._buckets[place]

    def _mark_ready(self, names: Sequence[str]) -> None:
        """Send what is complete, now that the gradients of these parameters are."""
        self._missing[self._bucket_of[names[0]]].difference_update(names)
        if self._reduces_this_pass:
            while self._sent < len(self._buckets) and not self._missing[self._sent]:
                self._start_reduction()

    def set_is_last_backward(self) -> None:
        self._reduces_this_pass = True

    def accumulate(self) -> None:
        for leaf in self._leaves:
            self.take(leaf)
        if self._reduces_this_pass:
            self._start_remaining()
        self._missing = [set(bucket.entries) for bucket in self._buckets]
        self._reduces_this_pass = self._reduces_every_pass
        self._sent = 0

    def reduce(self) -> None:
        if not self._is_reduced:
            self._start_remaining()
            self._sent = 0
        while self._under_way:
            self._advance()
        for bucket in self._buckets:
            bucket.set_master_gradients()
        self._is_reduced = False

    def norm(self) -> Tensor:
        counted = [bucket.gradient for bucket in self._buckets if bucket.axes.is_counted]
        return global_norm(counted, self._zero, self._world_axis)

    @torch.no_grad()
    def sync_weights(self) -> None:
        for bucket in self._buckets:
            bucket.round_masters()
        self.all_gather_weights()

    def all_gather_weights(self) -> None:
        self.start_all_gather_weights()
        self.wait()

    def free_gradients(self) -> None:
        """The gradients, and free their memory."""
        for bucket in self._buckets:
            bucket.free_gradient()

    @torch.no_grad()
    def start_all_gather_weights(self) -> None:
        """`all_gather_weights` without its end: parameters hold neither old nor new weights until `wait`."""
        for bucket in reversed(self._buckets):
            bucket.start_all_gather()

    def wait(self, names: Sequence[str] | None = None) -> None:
        """Until the weights of these parameters, or of all, are there. On a GPU the stream waits, not the host."""
        for place in range(len(self._buckets)) if names is None else {self._bucket_of[name] for name in names}:
            self._buckets[place].wait()

    def wait_in_graph(self, graph: fx.GraphModule) -> None:
        """Let a captured graph, in place, wait for weights before it first reads them, so that
        `start_all_gather_weights` at the end of a step or at the beginning of the next runs while the first layers
        compute. Do so before the graph is divided.
        """
        waited: set[int] = set()
        layer = None  # of what stands before: the weight of the last norm has none, and is waited for in the last one
        for node in list(graph.graph.nodes):
            layer = layer if node.meta.get("layer") is None else node.meta["layer"]
            fetched = node.meta.get("parameters", ()) if node.op == "get_attr" else ()
            names = [name for name in fetched if self._bucket_of[name] not in waited]
            if names:
                waited |= {self._bucket_of[name] for name in names}
                with graph.graph.inserting_before(node):
                    waiting = graph.graph.call_function(self.wait, (names,))
                waiting.meta["layer"] = layer
        graph.recompile()

    def _start_remaining(self) -> None:
        while self._sent < len(self._buckets):
            self._start_reduction()
        self._is_reduced = True

    def _start_reduction(self) -> None:
        """Begin to reduce the next bucket. All ranks send the buckets in one order, whatever came first."""
        self._end_earlier_passes()
        self._advance()
        reduction = self._buckets[self._sent].reduction()
        next(reduction)
        self._under_way.append(reduction)
        self._sent += 1

    def _end_earlier_passes(self) -> None:
        """Before the first gradient of a pass: what was sent before has arrived while it went forward, and the memory
        of the last messages, an embedding's, is wanted for the head's.
        """
        while not self._sent and self._under_way:
            self._advance()

    def _advance(self) -> None:
        """One step further with every reduction under way: by now its message has probably arrived."""
        ended = object()
        self._under_way = [one for one in self._under_way if next(one, ended) is not ended]


@dataclass(frozen=True, eq=False)
class LeafGradientTarget:
    """Where `ZeroGradients` want the gradient of a tensor that they watch; a `GradientTarget` of `linear_into`."""

    gradients: ZeroGradients
    leaf: Tensor

    def memory(self) -> Memory:
        return self.gradients.memory(self.leaf)

    def written(self) -> None:
        self.gradients.written(self.leaf)


def leave_meta(model: nn.Module, device: torch.device) -> None:
    """Buffers that are on the meta device get memory, and so do parameters without gradients; others there become zeros
    on `device` that take none, so that a bucket, and never the whole model, has them in the masters' dtype.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                shape = () if parameter.requires_grad else parameter.shape
                held = torch.zeros(shape, dtype=parameter.dtype, device=device).expand(parameter.shape)
                setattr(module, name, nn.Parameter(held, parameter.requires_grad))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            # Not `to_empty`: its `empty_like` of a tensor on the meta device imports SymPy, half a second.
            module._apply(lambda one: torch.empty(one.shape, dtype=one.dtype, device=device), recurse=False)


def _make_buckets(
    model: nn.Module,
    axes: Mapping[str, GradientAxes],
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    least: int,
    quantized: QuantizedSums | None,
) -> list[Bucket]:
    """In the order in which a backward pass completes them."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    place = {name: index for index, name in enumerate(parameters)}
    runs = []
    for kind in dict.fromkeys(axes[name] for name in parameters):
        alike = [name for name in parameters if axes[name] == kind]
        runs += divide_into_buckets(alike, sizes, least)
    runs.sort(key=lambda run: place[run[0]], reverse=True)
    buckets = []
    for run in runs:
        dtype = parameters[run[0]].dtype
        wide = reduce_dtype or torch.promote_types(dtype, torch.float32)
        held = {name: parameters[name] for name in run}
        buckets.append(Bucket(held, axes[run[0]], compute_dtype or dtype, wide, quantized))
    return buckets
