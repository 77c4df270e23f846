"""Gradient buckets: parameters side by side in flat memory, reduced and gathered in one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from strata.comm.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from strata.comm.mesh import Axis
from strata.kernels.gradient_target import Memory
from strata.parallel.data_parallel import GradientAxes, ParameterShard
from strata.parallel.quantized_sums import ROW, QuantizedSums, Sum

# Elements that the shard of a rank is a multiple of, so that vector loads of any kernel are aligned.
_ALIGNMENT = 64

# Elements of a message of gradients or weights at least: a layer or more.
BUCKET_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class BucketedParameter:
    """Where a parameter lies in a bucket: elements `first` to `end` - 1."""

    name: str
    parameter: nn.Parameter
    first: int
    end: int


class Bucket:
    """Some parameters of a model, flat and without gaps, and what this rank keeps of them for the optimizer.

    The parameters are views of `weights` from the moment the bucket is made: what is gathered there is theirs without
    a copy. Assigning other memory to one of them breaks that tie.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        axes: GradientAxes,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        quantized: QuantizedSums | None = None,
    ) -> None:
        """compute_dtype: of the model from now on; masters keep the dtype that the parameters have. quantized: what
        sums over ranks in 8 bits."""
        self.axes, self.reduce_dtype, self._quantized = axes, reduce_dtype, quantized
        self.entries: dict[str, BucketedParameter] = {}
        end = 0
        for name, parameter in parameters.items():
            self.entries[name] = BucketedParameter(name, parameter, end, end + parameter.numel())
            end += parameter.numel()
        ranks, index = axes.reduce_scatter.size, axes.reduce_scatter.index
        alignment = _ALIGNMENT if quantized is None else ROW
        self.size = -(-end // (ranks * alignment)) * ranks * alignment
        self._first = self.size // ranks * index
        self._end = self.size // ranks * (index + 1)
        self._place(compute_dtype)
        self.shards = list(self._make_shards())
        self._gradients: Tensor | None = None
        self._taken: set[str] = set()
        self._reduced: Tensor | None = None
        self._gathering: Pending | None = None

    def _place(self, compute_dtype: torch.dtype) -> None:
        """Move the parameters into flat memory, this rank's shard of their values into the master."""
        example = next(iter(self.entries.values())).parameter
        self.master = example.new_zeros(self._end - self._first, requires_grad=False)
        self.weights = example.new_zeros(self.size, dtype=compute_dtype, requires_grad=False)
        for entry in self.entries.values():
            flat = entry.parameter.detach().flatten()
            first, end = max(entry.first, self._first), min(entry.end, self._end)
            if first < end:
                self.master[first - self._first : end - self._first] = flat[first - entry.first : end - entry.first]
            place = self.weights[entry.first : entry.end]
            entry.parameter.data = place.copy_(flat).view(entry.parameter.shape)
        if compute_dtype == self.master.dtype:
            self.master = self.local_weights

    @property
    def local_weights(self) -> Tensor:
        """This rank's shard of the weights, a view."""
        return self.weights[self._first : self._end]

    def _make_shards(self) -> Iterator[ParameterShard]:
        for entry in self.entries.values():
            first, end = max(entry.first, self._first), min(entry.end, self._end)
            if first < end:
                held = slice(first - self._first, end - self._first)
                master = nn.Parameter(self.master[held])
                yield ParameterShard(
                    entry.name, entry.parameter.shape, first - entry.first, self.local_weights[held], master
                )

    def memory(self, names: Sequence[str]) -> Memory:
        """Flat memory for the gradient of a parameter, or of several that lie side by side, and whether it holds one
        of this step already. Counts as taken from now on.
        """
        if self._gradients is None:
            self._gradients = self.weights.new_empty(self.size, dtype=self.reduce_dtype)
            last = max(entry.end for entry in self.entries.values())
            self._gradients[last:] = 0
        is_held = names[0] in self._taken
        self._taken.update(names)
        return self._gradients[self.entries[names[0]].first : self.entries[names[-1]].end], is_held

    def accumulate(self, names: Sequence[str], gradient: Tensor) -> None:
        """Add to the gradient of a parameter, or of several that lie side by side, given as one."""
        place, is_held = self.memory(names)
        if is_held:
            place.add_(gradient.flatten())
        else:
            place.copy_(gradient.flatten())

    def reduction(self) -> Iterator[None]:
        """Sum over the ranks. Each step waits for a message and sends the next; between them others can be sent."""
        if self._gradients is None:
            self._gradients = self.weights.new_zeros(self.size, dtype=self.reduce_dtype)
        else:
            for name in self.entries.keys() - self._taken:
                self._gradients[self.entries[name].first : self.entries[name].end] = 0
        given, self._gradients, self._taken = self._gradients, None, set()
        total = yield from self._scattered(given)
        for axis in self.axes.all_reduce:
            total = yield from self._everywhere(total, axis)
        total = total.to(self.master.dtype)
        self._reduced = total if self._reduced is None else self._reduced.add_(total)

    def _scattered(self, given: Tensor) -> Sum:
        """This rank's shard of the sum over the ranks that divide it."""
        if self._quantized is not None:
            return (yield from self._quantized.scattered(given, self.axes.reduce_scatter, id(self)))
        pending = start_reduce_scatter(given, self.axes.reduce_scatter)
        yield
        return pending.wait()

    def _everywhere(self, shard: Tensor, axis: Axis) -> Sum:
        """The sum over the ranks that hold the same shard."""
        if self._quantized is not None:
            return (yield from self._quantized.everywhere(shard, axis, (id(self), axis.name)))
        pending = start_all_reduce(shard, axis)
        yield
        return pending.wait()

    @property
    def gradient(self) -> Tensor:
        """This rank's shard of the sum over the ranks, in the masters' dtype, flat, with zeros for padding."""
        assert self._reduced is not None
        return self._reduced

    def set_master_gradients(self) -> None:
        """Set the gradients of the shards' masters, as views of `gradient`."""
        for shard in self.shards:
            first = self.entries[shard.name].first + shard.start - self._first
            shard.master.grad = self.gradient[first : first + shard.master.numel()]

    def round_masters(self) -> None:
        """Into this rank's shard of the weights."""
        if self.master.data_ptr() != self.local_weights.data_ptr():
            self.local_weights.copy_(self.master)

    def free_gradient(self) -> None:
        """The gradient."""
        for shard in self.shards:
            shard.master.grad = None
        self._reduced = None

    def start_all_gather(self) -> None:
        """Send this rank's shard of the weights to the others, and free the gradient."""
        self._check_place()
        self.free_gradient()
        self._gathering = start_all_gather(self.local_weights, self.axes.reduce_scatter, self.weights)

    def wait(self) -> None:
        """Until the weights are those of the last `start_all_gather`."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _check_place(self) -> None:
        start, width = self.weights.data_ptr(), self.weights.element_size()
        for entry in self.entries.values():
            if entry.parameter.data_ptr() != start + width * entry.first:
                raise RuntimeError(
                    f"parameter {entry.name} was moved away from the memory that its updates go to; "
                    f"move or cast a model before it is divided, and merge only what lies side by side"
                )


def divide_into_buckets(names: Sequence[str], sizes: Mapping[str, int], least: int) -> list[list[str]]:
    """Runs of whole layers of `least` elements or more, the last one maybe less.

    Within a layer the biases come last, so that parameters that may be merged into one matrix lie side by side.
    """
    runs: list[list[str]] = []
    held = least
    for _, block in groupby(names, _block):
        if held >= least:
            runs.append([])
            held = 0
        layer = sorted(block, key=lambda name: name.endswith(".bias"))
        runs[-1] += layer
        held += sum(sizes[name] for name in layer)
    return runs


def _block(name: str) -> list[str]:
    """model.layers.7 of model.layers.7.mlp.up_proj.weight."""
    return name.split(".")[:3]
