"""`quant_method: compressed-tensors`: integers of 4 and 8 bits in words, and values of 8 and 4 bits with scales.

Layouts: compressed-tensors 0.20.0, compressors/ (read 2026-11-23). `weight_global_scale` divides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from strata.files.fields import Fields
from strata.kernels.quant.quantized import MX_GROUP, NV_GROUP, QuantizedWeight, Scheme
from strata.models.checkpoint import StoredTensor
from strata.models.quantized.formats.compressed_rules import Group, Numbers, Rules, read_rules
from strata.models.quantized.formats.matrices import (
    QuantizedMatrix,
    ScaledMatrix,
    WordMatrix,
    check_fills_bytes,
    scheme_of_words,
)
from strata.models.quantized.formats.settings import take_cache
from strata.models.quantized.formats.stored import FLOATS, ONE, StoredTensors

_INPUT_SCALES = ("input_scale", "input_global_scale")
_Read = Callable[[StoredTensors, str, Numbers, str], QuantizedMatrix]


def read_compressed_tensors(fields: Fields, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """The matrices of a checkpoint, by name.

    Activations of 8 bits are rounded as a product reads them: by rows, with the scale that the file has for all rows,
    or by the blocks of a weight's columns. Activations of other bits than the weights are not rounded.
    """
    take_cache(fields, stored, "kv_cache_scheme")
    rules = read_rules(fields)
    packed = stored.owners("weight_packed")
    matrices = {}
    for owner in (*packed, *stored.owners("weight", torch.float8_e4m3fn, torch.int8)):
        group = rules.group_of(owner, _class_of(owner))
        if group is None or group.weights is None:
            raise ValueError(
                f"{fields.where}: {owner} is packed in {stored.folder}, but config_groups and ignore leave it plain"
            )
        if group.layout not in _LAYOUTS:
            accepted = ", ".join(map(repr, _LAYOUTS))
            raise ValueError(f"{fields.where}: format = {group.layout!r} is not supported; accepted are {accepted}")
        _check_numbers(group, fields.where, owner)
        rounding = _rounding(group)
        if rounding == "row" and group.activations is not None and not group.activations.dynamic:
            stored.take_input_scale(owner, _INPUT_SCALES[0])
        for last in _INPUT_SCALES:
            stored.pass_over(f"{owner}.{last}")
        matrices[f"{owner}.weight"] = _LAYOUTS[group.layout](stored, owner, group.weights, rounding)
    _check_plain(rules, stored, matrices)
    return matrices


def _class_of(owner: str) -> str:
    return "Embedding" if owner.endswith("embed_tokens") else "Linear"


def _check_plain(rules: Rules, stored: StoredTensors, matrices: dict[str, QuantizedMatrix]) -> None:
    """A class such as Linear may stand for modules that are plain here, as routers are; a name or pattern may not."""
    for owner in stored.owners("weight", *FLOATS):
        if f"{owner}.weight" not in matrices and len(stored[f"{owner}.weight"].shape) == 2 and rules.names(owner):
            raise ValueError(f"{stored.folder}: quantization_config says that {owner} is packed; its file holds floats")


def _check_numbers(group: Group, where: str, owner: str) -> None:
    weights, activations = group.weights, group.activations
    assert weights is not None
    kinds = _KINDS[group.layout]
    if (weights.kind, weights.bits) not in kinds:
        accepted = " or ".join(f"{kind} of {bits} bits" for kind, bits in kinds)
        raise ValueError(
            f"{where}: weights of {owner} are {weights.kind} of {weights.bits} bits in {group.layout!r}; "
            f"supported is {accepted}"
        )
    if weights.kind == "float" and not weights.symmetric:
        raise ValueError(f"{where}: floats that are not symmetric ({owner}) are not supported")
    if activations is not None and activations.kind == "int" and not activations.symmetric:
        raise ValueError(f"{where}: input_activations that are not symmetric ({owner}) are not supported")


def _rounding(group: Group) -> str:
    """How what these weights multiply is rounded, as `Scheme.activations` says it."""
    weights, activations = group.weights, group.activations
    assert weights is not None
    if activations is None or weights.bits != 8 or (activations.kind, activations.bits) != (weights.kind, 8):
        return ""
    if activations.strategy in ("group", "tensor_group"):
        if activations.columns == weights.columns:
            return "block"
        raise ValueError(
            f"activations in groups of {activations.columns} with weights in groups of {weights.columns} columns "
            f"(targets {', '.join(group.targets)}) are not supported"
        )
    if weights.columns:
        raise ValueError(
            f"activations with a scale for each {activations.strategy} and weights in groups of {weights.columns} "
            f"columns (targets {', '.join(group.targets)}) are not supported"
        )
    if not activations.dynamic and activations.strategy != "tensor":
        raise ValueError(
            f"activations with a scale for each {activations.strategy} that is found ahead (dynamic = False; targets "
            f"{', '.join(group.targets)}) are not supported; accepted is one for the tensor"
        )
    return "row"


def _groups(stored: StoredTensors, owner: str, width: int, columns: int) -> int:
    """How many groups of columns there are."""
    if columns and width % columns:
        raise ValueError(f"{stored.folder}: groups of {columns} do not divide the {width} columns of {owner}")
    return width // columns if columns else 1


def _read_values(stored: StoredTensors, owner: str, numbers: Numbers, rounding: str) -> QuantizedMatrix:
    """float-quantized, int-quantized, naive-quantized and mxfp8-quantized."""
    dtype = torch.int8 if numbers.kind == "int" else torch.float8_e4m3fn
    values = stored.take(f"{owner}.weight", (dtype,), dims=2)
    out, width = values.shape
    rows, columns = numbers.rows, numbers.columns
    if numbers.strategy == "tensor":
        shapes: tuple[tuple[int, ...], ...] = ONE
    elif numbers.strategy == "block":
        shapes = ((-(-out // rows), -(-width // columns)),)
    else:
        shapes = ((out, _groups(stored, owner, width, columns)),)
    scales = stored.take(f"{owner}.weight_scale", (*FLOATS, torch.uint8), *shapes)
    zeros = None
    if not numbers.symmetric:
        zeros = stored.take(f"{owner}.weight_zero_point", (torch.int8,), *shapes)
    scheme = Scheme("int8" if numbers.kind == "int" else "e4m3", rows, columns, rounding)
    return ScaledMatrix(stored, scheme, values, scales, zeros)


def _read_nvfp4(stored: StoredTensors, owner: str, numbers: Numbers, rounding: str) -> QuantizedMatrix:
    whole = stored.take(f"{owner}.weight_global_scale", (torch.float32,), *ONE)
    return _read_e2m1(stored, owner, numbers, NV_GROUP, torch.float8_e4m3fn, (whole, True))


def _read_mxfp4(stored: StoredTensors, owner: str, numbers: Numbers, rounding: str) -> QuantizedMatrix:
    return _read_e2m1(stored, owner, numbers, MX_GROUP, torch.uint8, None)


def _read_e2m1(
    stored: StoredTensors,
    owner: str,
    numbers: Numbers,
    group: int,
    dtype: torch.dtype,
    whole: tuple[StoredTensor, bool] | None,
) -> QuantizedMatrix:
    if numbers.columns != group:
        raise ValueError(f"{stored.folder}: {owner} has groups of {numbers.columns}; its format has groups of {group}")
    values = stored.take(f"{owner}.weight_packed", (torch.uint8,), dims=2)
    out, half = values.shape
    scales = stored.take(f"{owner}.weight_scale", (dtype,), (out, _groups(stored, owner, 2 * half, group)))
    return ScaledMatrix(stored, Scheme("e2m1", 1, group), values, scales, whole=whole)


def _read_words(stored: StoredTensors, owner: str, numbers: Numbers, rounding: str) -> QuantizedMatrix:
    """pack-quantized: int32 [out, width * bits / 32], the first column in the lowest bits, half the range added."""
    if numbers.strategy not in ("channel", "group"):
        raise ValueError(
            f"{stored.folder}: {owner} is pack-quantized with a scale for each {numbers.strategy}; supported is one "
            "for each channel or group"
        )
    values = stored.take(f"{owner}.weight_packed", (torch.int32,), dims=2)
    size = stored.take(f"{owner}.weight_shape", (torch.int64, torch.int32), (2,))
    out, words = values.shape
    bits, columns = numbers.bits, numbers.columns
    scale_name = f"{owner}.weight_scale"
    if columns and scale_name in stored and len(stored[scale_name].shape) == 2:
        width = stored[scale_name].shape[1] * columns
    else:
        # The last word of a row need not be full: what is stored tells.
        width = int(stored.read(size)[1])
    if -(-width * bits // 32) != words:
        raise ValueError(f"{stored.folder}: {values.name} is {list(values.shape)}, which {width} columns do not fill")
    if bits == 4:
        check_fills_bytes(values.name, width)
    groups = _groups(stored, owner, width, columns)
    scales = stored.take(scale_name, FLOATS, (out, groups))
    zeros = order = None
    if not numbers.symmetric:
        zeros = stored.take(f"{owner}.weight_zero_point", (torch.int32,), (-(-out * bits // 32), groups))
    if columns and f"{owner}.weight_g_idx" in stored:
        order = stored.take(f"{owner}.weight_g_idx", (torch.int32, torch.int64), (width,))
    scheme = scheme_of_words(bits, columns, rounding)
    return _SizedMatrix(stored, bits, scheme, (out, width), values, scales, zeros, order, size)


@dataclass(frozen=True)
class _SizedMatrix(WordMatrix):
    """size: what the file says of its shape."""

    size: StoredTensor

    def rows(self, first: int, end: int) -> QuantizedWeight:
        if tuple(self.stored.read(self.size).tolist()) != self.shape:
            raise ValueError(f"{self.size.file}: {self.size.name} is not {list(self.shape)}, as {self.values.name} is")
        return super().rows(first, end)


_LAYOUTS: dict[str, _Read] = {
    "pack-quantized": _read_words,
    "int-quantized": _read_values,
    "float-quantized": _read_values,
    "naive-quantized": _read_values,
    "nvfp4-pack-quantized": _read_nvfp4,
    "mxfp4-pack-quantized": _read_mxfp4,
    "mxfp8-quantized": _read_values,
}
_KINDS: dict[str, tuple[tuple[str, int], ...]] = {
    "pack-quantized": (("int", 4), ("int", 8)),
    "int-quantized": (("int", 8),),
    "float-quantized": (("float", 8),),
    "naive-quantized": (("int", 8), ("float", 8)),
    "nvfp4-pack-quantized": (("float", 4),),
    "mxfp4-pack-quantized": (("float", 4),),
    "mxfp8-quantized": (("float", 8),),
}
