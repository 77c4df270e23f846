"""Packed matrices of a checkpoint become the packed weight of a parameter, as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from strata.kernels.quant.quantized import (
    MX_GROUP,
    TWO_OF_FOUR,
    QuantizedWeight,
    Scheme,
    join,
    joinable,
    pack,
    scaled_apart,
    shard_of,
    shared_input_scale,
    with_scale_per_row,
)
from strata.kernels.quant.two_of_four import BYTE_COLUMNS
from strata.models.experts import stored_views
from strata.models.layers import CausalLM
from strata.models.quantized.checkpoint import Checkpoint
from strata.models.quantized.matrices import local_matrices
from strata.models.shard import Box, Boxes, ModelShard, whole

_VALUES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class Assembly:
    """The packed weight of one parameter, put together from the matrices that a checkpoint has apart.

    Of experts, `parts` matrices (gate and up, or down alone) stand above each other in each of `count`; otherwise there
    is one matrix (count 0). made: None before one came; its memory stays the same from then on.
    """

    def __init__(self, name: str, count: int, parts: int) -> None:
        self._name, self._count, self._parts = name, count, parts
        self.made: QuantizedWeight | None = None

    def put(self, number: int, matrix: QuantizedWeight) -> None:
        """Matrix `number` of the parameter, in the order of `stored_views`, beside the others or in the place of one.
        Raises ValueError if it cannot lie beside those that came before."""
        matrix = self._joinable(matrix)
        if self.made is None:
            self.made = matrix if not self._count else self._room_for(matrix)
            if not self._count:
                return
        self._require_alike(matrix)
        self.made = self.made._replace(input_scale=shared_input_scale((self.made, matrix)))
        expert, part = divmod(number, self._parts)
        for name, whole_of in self.made.tensors.items():
            if name != "order":
                piece = matrix.tensors[name]
                rows = piece.shape[0]
                target = whole_of[expert, part * rows : (part + 1) * rows] if self._count else whole_of
                target.copy_(piece)

    def like_all(self, matrix: QuantizedWeight) -> QuantizedWeight:
        """What it is if all matrices are like this one; their values are not filled in."""
        matrix = self._joinable(matrix)
        return self._room_for(matrix) if self._count else matrix

    @property
    def weight(self) -> QuantizedWeight:
        assert self.made is not None
        return self.made

    def _joinable(self, matrix: QuantizedWeight) -> QuantizedWeight:
        """With scales of which none is of the rows of two parts, nor of two matrices that are merged."""
        return with_scale_per_row(matrix) if not matrix.rows or matrix.shape[0] % matrix.rows else matrix

    def _room_for(self, matrix: QuantizedWeight) -> QuantizedWeight:
        tensors = {
            name: one if name == "order" else one.new_empty((self._count, self._parts * one.shape[0], *one.shape[1:]))
            for name, one in matrix.tensors.items()
        }
        return matrix.with_tensors(tensors)

    def _require_alike(self, matrix: QuantizedWeight) -> None:
        if matrix.rows != self.weight.rows or not joinable(matrix, self.weight):
            raise ValueError(
                f"the experts of {self._name} are packed in different ways, and one product multiplies by all of them: "
                "pack them alike"
            )


def assembly(model: CausalLM, name: str) -> Assembly:
    """For the parameter `name`. model: that has it, or the part of a model; it may be on the meta device."""
    parameter = model.get_parameter(name)
    if parameter.dim() == 2:
        return Assembly(name, 0, 1)
    _, stored = next(stored_views(model, name, parameter))
    shape = tuple(stored.shape)
    return Assembly(
        name, len(parameter), parameter.shape[-2] // local_matrices(name, shape, (whole(shape),))[0].shape[0]
    )


def quantized_box(box: Box, shape: tuple[int, ...], scheme: Scheme) -> Box:
    """What has to be read of a matrix of `shape` so that the box has the scales that it has in the whole matrix: all
    columns, as every scale of a row may follow from all of them, and the rows that share scales with the box's."""
    (first, end), _ = box
    out, width = shape
    group = out if _needs_all_rows(scheme) else scheme.rows
    return (first // group * group, min(out, -(-end // group) * group)), (0, width)


def _needs_all_rows(scheme: Scheme) -> bool:
    """Scales of NVFP4 are themselves scaled by the largest of their matrix."""
    return not scheme.rows or (scheme.values == "e2m1" and scheme.columns != MX_GROUP)


def pack_boxes(
    values: Callable[[Box], Tensor],
    shape: tuple[int, ...],
    boxes: Boxes,
    scheme: Scheme,
    like: QuantizedWeight | None = None,
) -> QuantizedWeight:
    """Boxes of a matrix of `shape` in a scheme, one above the other. values: those of a box of the matrix. like: see
    `pack`."""
    parts = []
    for box in boxes:
        (first, end), columns = box
        taken = quantized_box(box, shape, scheme)
        start = taken[0][0]
        parts.append(shard_of(pack(values(taken), scheme, like), (first - start, end - start), columns))
    return parts[0] if len(parts) == 1 else join(parts)


def planned_boxes(shape: tuple[int, ...], boxes: Boxes, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
    """What `pack_boxes` makes, as `planned_box` plans it."""
    parts = [planned_box(shape, box, scheme, dtype) for box in boxes]
    first = parts[0]
    if len(parts) == 1:
        return first
    own_rows = scaled_apart(parts)
    fields = {}
    for name, one in first.tensors.items():
        by_group = own_rows and name in ("scales", "zeros")
        rows = sum(part.shape[0] if by_group else part.tensors[name].shape[0] for part in parts)
        fields[name] = torch.empty(rows, *one.shape[1:], dtype=one.dtype, device="meta")
    return first.with_tensors(fields)._replace(rows=1 if own_rows else first.rows)


def planned_box(shape: tuple[int, ...], box: Box, scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
    """On the meta device what `pack_boxes` makes of a box of a matrix of `shape`, from the sizes alone: an operation on
    that device would import a package for symbolic algebra. dtype: of the matrix.

    Raises ValueError where a byte would be divided.
    """
    (first, end), (low, high) = box
    sparse = scheme.values == TWO_OF_FOUR
    if sparse and (low % BYTE_COLUMNS or high % BYTE_COLUMNS):
        raise ValueError(f"eight columns share a byte of 2:4 sparsity, and columns {low} to {high} divide one")
    two = scheme.values in ("int4", "e2m1")
    if two and (shape[1] % 2 or low % 2 or high % 2):
        raise ValueError(f"{scheme.values} packs two columns in a byte, and columns {low} to {high} divide one")
    rows, columns = scheme.rows or shape[0], scheme.columns
    if (low, high) != (0, shape[1]):
        columns = gcd(gcd(columns, low), high - low) if columns else 0
    own_rows = first % rows or (end % rows and end != shape[0])
    scaled_twice = scheme.values == "e2m1" and _needs_all_rows(scheme)
    scheme = scheme._replace(rows=1 if own_rows else scheme.rows, columns=columns)
    out, width = end - first, high - low
    groups = -(-out // scheme.rows) if scheme.rows else 1, -(-width // columns) if columns else 1
    values = dtype if sparse else _VALUES.get(scheme.values, torch.uint8)
    scales, row_scales = torch.uint8 if sparse else torch.float32, None
    if scheme.values == "e2m1":
        scales = torch.float8_e4m3fn if scaled_twice else torch.uint8
    if scaled_twice:
        row_scales = torch.empty(out, 1, dtype=torch.float32, device="meta")
    made = torch.empty(out, width // 2 if two or sparse else width, dtype=values, device="meta")
    return QuantizedWeight.of(scheme, made, torch.empty(groups, dtype=scales, device="meta"), None, row_scales)


def meta_weights(
    model: CausalLM,
    complete: CausalLM,
    part: ModelShard | None,
    schemes: Mapping[str, Scheme],
    checkpoint: Checkpoint | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, QuantizedWeight]:
    """The packed weights of these parameters on the meta device, of the shapes that they will have.

    model: of `part`, or, where that is None, `complete`, of the whole config. dtype: of floats. checkpoint: that has
    them packed already, of which one matrix of each kind is read. Raises ValueError, with the parameter's name, for one
    that cannot be packed.
    """
    found = {}
    read: dict[tuple[Any, ...], QuantizedWeight] = {}
    for name, scheme in schemes.items():
        stored, tensor = next(stored_views(complete, name, complete.get_parameter(name)))
        sizes = tuple(tensor.shape)
        shape, boxes, *_ = local_matrices(name, sizes, (whole(sizes),) if part is None else part.boxes(name, sizes))[0]
        try:
            if checkpoint is None or checkpoint.format is None:
                like = planned_boxes(shape, boxes, scheme, dtype)
            else:
                if (key := (scheme, shape, boxes)) not in read:
                    read[key] = _on_meta(checkpoint.read(stored, boxes))
                like = _on_meta(read[key])  # each its own: what shares memory is not merged
            found[name] = assembly(model, name).like_all(like)
        except ValueError as error:
            raise ValueError(f"{name} cannot be packed: {error}") from None
    return found


def _on_meta(weight: QuantizedWeight) -> QuantizedWeight:
    return weight.with_tensors(
        {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in weight.tensors.items()}
    )
