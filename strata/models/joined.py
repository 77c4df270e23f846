"""Matrices that a family's checkpoints join, one above the other, and that its model has apart: read and written."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from strata.models.checkpoint import StoredTensor
from strata.models.experts import SparseCausalLM, stored_views
from strata.models.joined_experts import joined_experts
from strata.models.layers import CausalLM

_LAYER = re.compile(r"model\.layers\.\d+\.")


def split_tensors(
    model: nn.Module, parameters: dict[str, Tensor], tensors: dict[str, StoredTensor], folder: Path
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, the parts of joined ones under the names of the parameters that they are.

    parameters: of the whole model, by name. Raises ValueError that names a joined tensor that is absent or of another
    shape than its parts have together.
    """
    tensors = dict(tensors)
    for name, parts in joined_names(model, parameters):
        sizes = [parameters[part].shape[0] for part in parts]
        expected = (sum(sizes), *parameters[parts[0]].shape[1:])
        whole = tensors.pop(name, None)
        if whole is None:
            raise ValueError(f"{folder} lacks tensors that its config.json calls for: {name}")
        if whole.shape != expected:
            raise ValueError(
                f"{folder} has tensors of other shapes than its config.json says: {name} is {list(whole.shape)}, "
                f"expected {list(expected)}"
            )
        if present := [part for part in parts if part in tensors]:
            raise ValueError(f"{folder} has tensors that its config.json does not call for: {', '.join(present)}")
        first = 0
        for part, rows in zip(parts, sizes, strict=True):
            tensors[part] = dataclasses.replace(whole, shape=(rows, *whole.shape[1:]), first_row=first)
            first += rows
    return tensors


def checkpoint_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The values of a whole model's parameters under the names of its checkpoints."""
    return dict(checkpoint_values(model, ((name, one.detach()) for name, one in model.named_parameters())))


def checkpoint_values(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The values of a whole model's parameters, given by name in the model's order, under the names of its checkpoints.

    Of values that are made one after another, those of one layer are held at a time.
    """
    for _, of_layer in itertools.groupby(values, key=_layer):
        yield from join_parameters(model, dict(_views(model, of_layer))).items()


def _views(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The values, those of experts apart unless the family's checkpoints have them together."""
    if isinstance(model, SparseCausalLM) and model.expert_names.joined:
        yield from values
        return
    for name, value in values:
        yield from stored_views(model, name, value)


def _layer(named: tuple[str, Tensor]) -> str | None:
    """What the names of a layer's parameters begin with; None: it is in no layer."""
    found = _LAYER.match(named[0])
    return found and found[0]


def join_parameters(model: nn.Module, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """What there is of each of a whole model's parameters, by name, as its checkpoints have it."""
    if isinstance(model, SparseCausalLM) and model.expert_names.joined:
        return {name: joined_experts(name, one) for name, one in parameters.items()}
    homes = {part: (name, parts) for name, parts in joined_names(model, parameters) for part in parts}
    found: dict[str, Tensor] = {}
    for key, parameter in parameters.items():
        name, parts = homes.get(key, (key, (key,)))
        if name not in found:
            found[name] = parameter if name == key else torch.cat([parameters[part] for part in parts])
    return found


def joined_names(model: nn.Module, parameters: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """The name of each joined tensor, and those of its parts in order."""
    joined = model.joined if isinstance(model, CausalLM) else {}
    for name, parts in joined.items():
        block, _, whole = name.rpartition(".")
        for parameter in parameters:
            path, _, own = parameter.rpartition(f".{block}.")
            if path and own.removesuffix(".weight") == parts[0]:
                yield f"{path}.{block}.{whole}.weight", [f"{path}.{block}.{part}.weight" for part in parts]
