"""The gradients of one process: nothing travels, and those of a step with one pass are not even copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from strata.parallel.buckets import divide_into_buckets
from strata.parallel.data_parallel import ParameterShard
from strata.parallel.zero import leave_meta


class OneDeviceGradients:
    """`Gradients` of a model that one process holds whole.

    Gradients of a step with one pass keep the model's dtype; those of several passes add up in the masters'.
    """

    shards: Sequence[ParameterShard]
    frozen: Sequence[ParameterShard] = ()

    def __init__(self, model: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> None:
        """The parameters of `model` become views of flat memory on `device`, so that those which may be merged lie side
        by side; masters keep the dtype that the parameters have. The model may be on the meta device.
        """
        leave_meta(model, device)
        parameters = dict(model.named_parameters())
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        (order,) = divide_into_buckets(list(parameters), sizes, sum(sizes.values()))
        wide = parameters[order[0]].dtype
        self._weights = torch.zeros(sum(sizes.values()), dtype=compute_dtype, device=device)
        self._masters = self._weights if wide == compute_dtype else torch.zeros_like(self._weights, dtype=wide)
        self.shards = list(self._place(parameters, order))
        self._leaves: dict[Tensor, list[str]] = {parameter: [name] for name, parameter in parameters.items()}
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._held: dict[str, Tensor] = {}
        self._is_first, self._is_last = True, False

    def _place(self, parameters: dict[str, nn.Parameter], order: Sequence[str]) -> Iterator[ParameterShard]:
        end = 0
        for name in order:
            parameter = parameters[name]
            place = slice(end, end := end + parameter.numel())
            values = parameter.detach().flatten()
            weight, master = self._weights[place], nn.Parameter(self._masters[place])
            master.grad_dtype = None  # a gradient may be narrower
            with torch.no_grad():
                master.copy_(values)
                weight.copy_(values)
            parameter.data = weight.view(parameter.shape)
            yield ParameterShard(name, parameter.shape, 0, weight, master)

    def watch(self, leaf: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradient of `leaf`, which is a view of several parameters that lie side by side, as theirs."""
        for before, after in pairwise(parameters):
            assert before.data_ptr() + before.nbytes == after.data_ptr()
        assert leaf.untyped_storage().data_ptr() == self._weights.data_ptr(), "updates go to other memory"
        self._leaves[leaf] = [name for parameter in parameters for name in self._leaves[parameter]]

    def memory(self, leaf: Tensor) -> None:
        """There are no messages: gradients stay with autograd until the pass has ended."""

    def written(self, leaf: Tensor) -> None:
        """Nothing waits for this gradient."""

    def set_is_last_backward(self) -> None:
        self._is_last = True

    @torch.no_grad()
    def accumulate(self) -> None:
        is_only = self._is_first and self._is_last
        for leaf, names in self._leaves.items():
            if leaf.grad is None:
                continue
            parts = leaf.grad.split([self._shapes[name][0] for name in names])
            for name, part in zip(names, parts, strict=True):
                self._add(name, part.flatten(), copy=not is_only)
            leaf.grad = None
        self._is_first = False

    def _add(self, name: str, gradient: Tensor, *, copy: bool) -> None:
        if name in self._held:
            self._held[name].add_(gradient)
        else:
            self._held[name] = gradient.to(self._masters.dtype, copy=True) if copy else gradient

    def reduce(self) -> None:
        for shard in self.shards:
            held = self._held.get(shard.name)
            shard.master.grad = torch.zeros_like(shard.master) if held is None else held
        self._held = {}
        self._is_first, self._is_last = True, False

    def norm(self) -> Tensor:
        gradients = [shard.master.grad for shard in self.shards if shard.master.grad is not None]
        norms = torch._foreach_norm(gradients, 2, dtype=self._masters.dtype)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    @torch.no_grad()
    def sync_weights(self) -> None:
        if self._masters is not self._weights:
            self._weights.copy_(self._masters)
        self.all_gather_weights()

    def all_gather_weights(self) -> None:
        self.start_all_gather_weights()

    def start_all_gather_weights(self) -> None:
        """Nobody else has weights."""
        self.free_gradients()

    def free_gradients(self) -> None:
        for shard in self.shards:
            shard.master.grad = None

    def wait(self) -> None:
        """The weights are there."""
