"""What a family's checkpoints join and its model has apart, read and written: matrices one above the other, and the
matrices of all experts in one tensor, gate and up interleaved (gpt-oss)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from strata.kernels.quant.mxfp4 import GROUP, dequantize
from strata.models.checkpoint import ExpertPlace, StoredTensor
from strata.models.experts import SparseCausalLM, has_joined_experts, stored_views
from strata.models.layers import CausalLM

_LAYER = re.compile(r"model\.layers\.\d+\.")
# Of an expert, the matrices that stand in one tensor, output by output in turn.
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


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
        whole = _take(tensors, name, expected, folder)
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
        yield from join_parameters(model, dict(stored_values(model, of_layer))).items()


def stored_values(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The values, those of experts apart unless the family's checkpoints have them together."""
    if has_joined_experts(model):
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
    if has_joined_experts(model):
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


def split_experts(
    model: nn.Module, parameters: dict[str, Tensor], tensors: dict[str, StoredTensor], folder: Path
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, those of all experts as the matrices and biases of each expert that they hold.

    parameters: of the whole model, by name. Of either form: `gate_up_proj` [experts, inputs, outputs] in floats, or
    `gate_up_proj_blocks` [experts, outputs, inputs / 32, 16] and `gate_up_proj_scales` in mxfp4. Raises ValueError that
    names a tensor that is absent, or of another shape than the experts have together.
    """
    if not has_joined_experts(model):
        return tensors
    assert isinstance(model, SparseCausalLM)
    tensors, count = dict(tensors), model.expert_count
    for layer in {name.partition(".experts.")[0] for name in parameters if ".experts." in name}:
        block = f"{layer}.experts"
        for name, parts in PARTS.items():
            outputs, inputs = parameters[f"{block}.0.{parts[0]}.weight"].shape
            rows = len(parts) * outputs
            whole, scales = _take_weight(tensors, f"{block}.{name}", (count, rows, inputs), folder)
            bias = _take(tensors, f"{block}.{name}_bias", (count, rows), folder)
            for number in range(count):
                for first, part in enumerate(parts):
                    place = ExpertPlace(number, first, len(parts), scales)
                    own, kind = f"{block}.{number}.{part}", torch.float32 if scales else whole.dtype
                    tensors[f"{own}.weight"] = dataclasses.replace(
                        whole, dtype=kind, shape=(outputs, inputs), expert=place
                    )
                    place = dataclasses.replace(place, scales=None)
                    tensors[f"{own}.bias"] = dataclasses.replace(bias, shape=(outputs,), expert=place)
    return tensors


def _take_weight(
    tensors: dict[str, StoredTensor], name: str, shape: tuple[int, int, int], folder: Path
) -> tuple[StoredTensor, StoredTensor | None]:
    """The tensor, and its scales if it is packed. shape: experts, outputs, inputs."""
    count, rows, inputs = shape
    if f"{name}_blocks" not in tensors:
        return _take(tensors, name, (count, inputs, rows), folder), None
    if inputs % GROUP:
        raise ValueError(
            f"{folder}: {name}_blocks holds rows of {inputs} values, which groups of {GROUP} do not divide"
        )
    groups = inputs // GROUP
    blocks = _take(tensors, f"{name}_blocks", (count, rows, groups, GROUP // 2), folder, torch.uint8)
    return blocks, _take(tensors, f"{name}_scales", (count, rows, groups), folder, torch.uint8)


def _take(
    tensors: dict[str, StoredTensor],
    name: str,
    shape: tuple[int, ...],
    folder: Path,
    dtype: torch.dtype | None = None,
) -> StoredTensor:
    """dtype: None: any of floats."""
    whole = tensors.pop(name, None)
    if whole is None:
        raise ValueError(f"{folder} lacks tensors that its config.json calls for: {name}")
    if whole.shape != shape:
        raise ValueError(
            f"{folder} has tensors of other shapes than its config.json says: {name} is {list(whole.shape)}, "
            f"expected {list(shape)}"
        )
    if whole.dtype != dtype if dtype is not None else not whole.dtype.is_floating_point:
        raise ValueError(f"{folder}: {name} has dtype {whole.dtype}, expected {dtype or 'floats'}")
    return whole


def read_expert(reader: Any, stored: StoredTensor, box: tuple[tuple[int, int], ...]) -> Tensor:
    """A box of the matrix [outputs, inputs] or bias [outputs] of one expert. reader: of the file that it lies in."""
    place = stored.expert
    assert place is not None
    (first, end), *others = box
    expert, rows = slice(place.number, place.number + 1), slice(first * place.step, end * place.step)
    own = slice(place.first, None, place.step)
    tensor = reader.get_slice(stored.name)
    if not others:
        bias: Tensor = tensor[expert, rows][0, own]
        return bias
    low, high = others[0]
    if place.scales is None:
        matrix: Tensor = tensor[expert, low:high, rows][0, :, own]
        return matrix.t()
    groups = slice(low // GROUP, -(-high // GROUP))
    blocks = tensor[expert, rows, groups][0, own]
    if place.scales.file == stored.file:
        scales = reader.get_slice(place.scales.name)[expert, rows, groups][0, own]
    else:
        with safe_open(place.scales.file, framework="pt", device="cpu") as other:
            scales = other.get_slice(place.scales.name)[expert, rows, groups][0, own]
    skipped = low - groups.start * GROUP
    return dequantize(blocks, scales)[:, skipped : skipped + high - low]


def joined_experts(name: str, parameter: Tensor) -> Tensor:
    """A parameter as its checkpoint has it: of all experts gate and up interleaved, inputs before outputs."""
    own = name.partition(".experts.")[2].removesuffix("_bias")
    if own not in PARTS:
        return parameter
    parts = len(PARTS[own])
    # [experts, parts, outputs, inputs], of a bias without inputs.
    apart: Tensor = parameter.unflatten(1, (parts, -1))
    return apart.transpose(1, 2).flatten(1) if parameter.dim() == 2 else apart.permute(0, 3, 2, 1).flatten(2)
