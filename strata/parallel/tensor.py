"""Tensor parallelism (Shoeybi et al. 2019), with sequence parallelism (Korthikanti et al. 2022) if asked for.

A model becomes one rank's shard: its parameters are cut as the table of its family says, and tensors are converted at
the boundaries of modules. Parameters stay plain tensors under the checkpoint's names, so every kernel runs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.comm.collectives import all_gather, all_reduce, copy_to, reduce_scatter, start_all_reduce
from strata.comm.mesh import Axis
from strata.comm.placement import Placement
from strata.kernels.linear.embedding import embedding
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import mean_square, sharded_rms_norm
from strata.models.batch import Batch
from strata.models.layers import Linear, TokenEmbedding, WideRMSNorm
from strata.parallel.families import Table, placements, span
from strata.parallel.ring_products import products_of_gathered, scattered_product

_DECODER, _LAST_NORM = "model", "model.norm"


@dataclass(frozen=True)
class TensorSharding:
    """How the ranks of a tensor axis hold the parameters of a model, by name.

    shapes: of the whole parameters. experts: the axis that divides the experts; None while every rank holds all of
    them.
    """

    axis: Axis
    sequence_parallel: bool
    placements: Mapping[str, Placement]
    shapes: Mapping[str, tuple[int, ...]]
    experts: Axis | None = None

    def is_replicated(self, name: str) -> bool:
        """Whether all ranks of the axis hold the same parameter, rather than shards of it."""
        return self.placements[name].divided_dim is None

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard, a view, of a parameter that is given whole."""
        if (division := self._division(name)) is None:
            return full
        dim, axis = division
        first, end = span(full.shape[dim], axis.size, axis.index)
        return full.narrow(dim, first, end - first)

    def box(self, name: str) -> tuple[tuple[int, int], ...]:
        """Where this rank's shard lies in the whole parameter: first and end along every dimension."""
        box = [(0, size) for size in self.shapes[name]]
        if (division := self._division(name)) is not None:
            dim, axis = division
            box[dim] = span(self.shapes[name][dim], axis.size, axis.index)
        return tuple(box)

    def _division(self, name: str) -> tuple[int, Axis] | None:
        """The dimension that is divided and the ranks that divide it; None for a parameter that each holds whole."""
        if self.placements[name] is Placement.EXPERT:
            return None if self.experts is None else (0, self.experts)
        dim = self.placements[name].divided_dim
        return None if dim is None else (dim, self.axis)

    @torch.no_grad()
    def all_reduce_partial(self, gradients: Mapping[str, Tensor]) -> None:
        """All-reduce over the axis, in place and in one message, the gradients that are partial sums there.

        gradients: by parameter, of any shape (a data-parallel rank may hold a part of each), on every rank of the axis
        alike. Call it once a step, after the last backward pass.
        """
        parts = [
            gradient
            for name, gradient in gradients.items()
            if self.placements[name].gradient_is_partial(self.sequence_parallel)
        ]
        if self.axis.group is None or not parts:
            return
        total = start_all_reduce(torch.cat([part.flatten() for part in parts]), self.axis).wait()
        for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


def shard_model(
    model: nn.Module, axis: Axis, table: Table, *, sequence_parallel: bool = False, overlap: bool = False
) -> TensorSharding:
    """Make `model`, in place, the shard of this rank along `axis`.

    model: a `CausalLM`, whole, or a part of one whose parameters keep their full names (a pipeline stage). table: of
    its family, from `strata.parallel.families.sharding_table`. The layout must have been checked (`Layout.check`).

    Every rank calls the model with the same batch. Hidden states between the layers are alike on all ranks; with
    `sequence_parallel` a rank holds a part of the tokens, which are padded with rows of zeros to a multiple of the
    ranks. The model's result is whole again; its gradient is summed over the ranks, for each has a part of the
    vocabulary. `head` gives the logits of that part: use `strata.parallel.loss.vocabulary_cross_entropy`.

    overlap: with sequence parallelism, messages travel while the products that need them are computed
    (`strata.parallel.ring_products`); batches then need a multiple of the ranks of tokens.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    placed = placements(shapes, table)
    sharding = TensorSharding(axis, sequence_parallel, placed, shapes)
    if axis.group is None:
        return sharding
    column_groups: dict[str, ColumnGroup] = {}
    for name, parameter in list(model.named_parameters()):
        owner, _, own = name.rpartition(".")
        if not sharding.is_replicated(name):
            part = sharding.shard(name, parameter.detach()).clone(memory_format=torch.contiguous_format)
            setattr(model.get_submodule(owner), own, nn.Parameter(part, parameter.requires_grad))
        if own == "weight":
            _replace_module(model, owner, sharding, parameter.shape[0], overlap)
        if own == "weight" and placed[name] is Placement.COLUMN:
            group = column_groups.setdefault(owner.rpartition(".")[0], ColumnGroup(axis))
            if overlap:
                _replace(model, owner, ColumnLinear(_linear(model, owner), group))
    for owner in () if overlap else column_groups:
        model.get_submodule(owner).register_forward_pre_hook(_input_hook(axis, sequence_parallel))
    if f"{_LAST_NORM}.weight" in placed:
        model.get_submodule(_LAST_NORM).register_forward_hook(_output_hook(axis, sequence_parallel))
        if sequence_parallel:
            model.get_submodule(_DECODER).register_forward_hook(_without_padding)
    return sharding


class RowLinear(nn.Module):
    """A `Linear` whose inputs are divided: the products of all ranks are added up, then the bias, once."""

    bias: nn.Parameter | None

    def __init__(self, part: Linear, axis: Axis, sequence_parallel: bool, overlap: bool) -> None:
        super().__init__()
        self.weight = part.weight
        self.register_parameter("bias", part.bias)
        self.axis, self.sequence_parallel, self.overlap = axis, sequence_parallel, overlap

    def forward(self, x: Tensor) -> Tensor:
        if self.overlap:
            total = scattered_product(x, self.weight, self.axis)
        else:
            total = _reduce(linear(x, self.weight, None), self.axis, self.sequence_parallel)
        return total if self.bias is None else total + self.bias

    def between(self, inner: Tensor) -> Tensor:
        """What a product of two matrices beside this one has between them: this rank's part of a sum to the sum."""
        return _reduce(inner, self.axis, self.sequence_parallel)


class ColumnGroup:
    """The `ColumnLinear`s of one block. They read the same tokens, so the first that is called computes for all."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.members: list[ColumnLinear] = []
        self._input: Tensor | None = None
        self._products: dict[ColumnLinear, Tensor] = {}

    def product(self, member: ColumnLinear, x: Tensor) -> Tensor:
        """Of all tokens with the weight of `member`; each member asks once for the same `x`."""
        if x is not self._input:
            made = products_of_gathered(x, [one.weight for one in self.members], self.axis)
            self._input, self._products = x, dict(zip(self.members, made, strict=True))
        product = self._products.pop(member)
        if not self._products:
            self._input = None
        return product


class ColumnLinear(nn.Module):
    """A `Linear` whose outputs are divided, of this rank's tokens: the others arrive while these are multiplied."""

    bias: nn.Parameter | None

    def __init__(self, part: Linear, group: ColumnGroup) -> None:
        super().__init__()
        self.weight = part.weight
        self.register_parameter("bias", part.bias)
        self.group = group
        group.members.append(self)

    def forward(self, x: Tensor) -> Tensor:
        product = self.group.product(self, x)
        return product if self.bias is None else product + self.bias

    def between(self, inner: Tensor) -> Tensor:
        """What a product of two matrices beside this one has between them: of this rank's tokens to that of all."""
        return all_gather(inner, self.group.axis, 0)


class VocabularyEmbedding(nn.Module):
    """A `TokenEmbedding` of whose rows this rank has those from `first` on: others give zero, ranks are added up."""

    def __init__(self, part: TokenEmbedding, first: int, axis: Axis, sequence_parallel: bool, overlap: bool) -> None:
        super().__init__()
        self.weight = part.weight
        self.first, self.axis, self.sequence_parallel, self.overlap = first, axis, sequence_parallel, overlap

    def forward(self, tokens: Tensor) -> Tensor:
        if self.overlap and tokens.shape[0] % self.axis.size:
            raise ValueError(
                f"a batch of {tokens.shape[0]} tokens cannot overlap its messages on tp = {self.axis.size} ranks, "
                f"which do not divide it; make batches of a multiple, or leave overlap out"
            )
        own = (tokens >= self.first) & (tokens < self.first + self.weight.shape[0])
        rows: Tensor = embedding(torch.where(own, tokens - self.first, 0), self.weight)
        return _reduce(torch.where(own[:, None], rows, 0), self.axis, self.sequence_parallel)


class DividedNorm(nn.Module):
    """A `WideRMSNorm` of rows that the ranks divide: each has some columns, and the scale is that of the whole row."""

    def __init__(self, part: WideRMSNorm, axis: Axis) -> None:
        super().__init__()
        self.weight, self.eps, self.offset, self.axis = part.weight, part.eps, part.offset, axis

    def forward(self, x: Tensor) -> Tensor:
        # Each rank scales its own columns by the sum, so what reaches the sum has to be added up on the way back.
        total = copy_to(all_reduce(mean_square(x).contiguous(), self.axis), self.axis)
        normed: Tensor = sharded_rms_norm(x, total, self.axis.size, self.weight, self.eps, self.offset)
        return normed


def _replace_module(model: nn.Module, name: str, sharding: TensorSharding, rows: int, overlap: bool) -> None:
    """Put the sharded module in place of one whose sum goes over ranks. rows: of its weight before it was cut."""
    module, placement = model.get_submodule(name), sharding.placements[f"{name}.weight"]
    arguments = sharding.axis, sharding.sequence_parallel, overlap
    if placement is Placement.ROW:
        _replace(model, name, RowLinear(_linear(model, name), *arguments))
    if placement is Placement.DIVIDED_NORM:
        assert isinstance(module, WideRMSNorm)
        _replace(model, name, DividedNorm(module, sharding.axis))
    if placement is Placement.VOCABULARY and isinstance(module, TokenEmbedding):
        first, _ = span(rows, sharding.axis.size, sharding.axis.index)
        _replace(model, name, VocabularyEmbedding(module, first, *arguments))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _linear(model: nn.Module, name: str) -> Linear:
    module = model.get_submodule(name)
    assert isinstance(module, Linear)
    return module


def _input_hook(axis: Axis, sequence_parallel: bool) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Before a module whose first matrices have divided outputs: it wants all tokens, and each rank's part of their
    gradient is added up. Padding is cut off where the module knows how many tokens there are.
    """

    def enter(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = arguments
        if not sequence_parallel:
            return copy_to(x, axis), *others
        x = all_gather(x, axis, 0)
        batch = next((one for one in others if isinstance(one, Batch)), None)
        return x if batch is None else x[: batch.tokens.shape[0]], *others

    return enter


def _output_hook(axis: Axis, sequence_parallel: bool) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """After the last norm: the head, of which each rank has a part of the rows, wants all tokens."""

    def leave(module: nn.Module, arguments: Any, hidden: Tensor) -> Tensor:
        return all_gather(hidden, axis, 0) if sequence_parallel else copy_to(hidden, axis)

    return leave


def _without_padding(module: nn.Module, arguments: tuple[Batch], hidden: Tensor) -> Tensor:
    return hidden[: arguments[0].tokens.shape[0]]


def _reduce(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """The sum of the parts that the ranks hold; with sequence parallelism, this rank's tokens of it."""
    if not sequence_parallel:
        return all_reduce(x, axis)
    padding = -x.shape[0] % axis.size
    return reduce_scatter(F.pad(x, (0, 0, 0, padding)) if padding else x, axis, 0)
