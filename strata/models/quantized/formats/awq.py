"""`quant_method: awq`: integers of 4 bits with scales and zeros of groups, in the layout that AutoAWQ calls GEMM.

qweight: int32 [width, out / 8]; value j of a word belongs to row _PLACES[j] of its eight. qzeros: the same of
[groups, out]. scales: [groups, out]. A weight is (q - zero) * scale (AutoAWQ 0.2.9, awq/utils/packing_utils.py, read
2026-11-22).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strata.files.fields import Fields
from strata.kernels.quant.quantized import QuantizedWeight, Scheme
from strata.models.checkpoint import StoredTensor
from strata.models.quantized.formats.matrices import (
    QuantizedMatrix,
    bytes_of,
    check_fills_bytes,
    copied,
    nibbles_of,
    scheme_of_words,
)
from strata.models.quantized.formats.settings import HOW_MADE, take_group, take_names, take_object
from strata.models.quantized.formats.stored import FLOATS, StoredTensors

_BITS = 4
_IN_A_WORD = 32 // _BITS
_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
_VALUE_OF_ROW = [_PLACES.index(row) for row in range(_IN_A_WORD)]
# How fused modules of AutoAWQ are to be run.
_OF_FUSED = frozenset({"do_fuse", "fuse_max_seq_len", "modules_to_fuse"})


def read_awq(fields: Fields, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """The matrices of a checkpoint, by name."""
    for key in ("bits", "w_bit"):
        fields.only(key, _BITS, "AWQ has them")
    group = take_group(fields, "group_size", "q_group_size")
    for key in ("version", "format", "checkpoint_format"):
        _check_layout(fields, key)
    fields.choice("zero_point", (True, False), True)  # the zeros are there all the same
    fields.choice("sym", (True, False, None), None)
    fields.only("desc_act", False, "AWQ leaves columns in their order")
    if take_object(fields, "dynamic"):
        raise ValueError(f"{fields.where}: dynamic is not supported in AWQ; accepted is null")
    fields.only("method", "awq", "quant_method says so")
    fields.only("pack_dtype", "int32", "other words are not implemented")
    take_names(fields, "modules_to_not_convert")  # the tensors' names tell it
    fields.finish(HOW_MADE | _OF_FUSED)
    return {f"{owner}.weight": _matrix(stored, owner, group) for owner in stored.owners("qweight")}


def _check_layout(fields: Fields, key: str) -> None:
    value = fields.take(key, None)
    if value is not None and (not isinstance(value, str) or value.lower() != "gemm"):
        raise fields.wrong(key, value, "'gemm'; convert the checkpoint to it, or to compressed-tensors")


def _matrix(stored: StoredTensors, owner: str, group: int) -> QuantizedMatrix:
    values = stored.take(f"{owner}.qweight", (torch.int32,), dims=2)
    width, words = values.shape
    check_fills_bytes(values.name, width)
    if group and width % group:
        raise ValueError(f"{stored.folder}: groups of {group} do not divide the {width} columns of {owner}")
    groups = width // group if group else 1
    zeros = stored.take(f"{owner}.qzeros", (torch.int32,), (groups, words))
    scales = stored.take(f"{owner}.scales", FLOATS, (groups, words * _IN_A_WORD))
    return _AwqMatrix(stored, scheme_of_words(_BITS, group), values, zeros, scales)


@dataclass(frozen=True)
class _AwqMatrix:
    stored: StoredTensors
    scheme: Scheme
    values: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    step: int = _IN_A_WORD

    @property
    def shape(self) -> tuple[int, int]:
        width, words = self.values.shape
        return words * _IN_A_WORD, width

    def rows(self, first: int, end: int) -> QuantizedWeight:
        every, words = slice(None), slice(first // _IN_A_WORD, end // _IN_A_WORD)
        values = _in_pairs(self.stored.read(self.values, every, words))
        zeros = _in_order(self.stored.read(self.zeros, every, words))
        scales = copied(self.stored.read_scales(self.scales, every, slice(first, end)).t())
        return QuantizedWeight.of(self.scheme, values, scales, zeros=zeros)


def _in_pairs(words: Tensor) -> Tensor:
    """int32 [width, out / 8] -> uint8 [out, width / 2], two columns in a byte."""
    turned = copied(words.t())
    even, odd = turned[:, ::2], turned[:, 1::2]
    packed = torch.empty(len(turned), _IN_A_WORD, even.shape[1], dtype=torch.uint8)
    for value, row in enumerate(_PLACES):
        shift = _BITS * value
        packed[:, row] = (even >> shift & 15) | (odd >> shift & 15) << _BITS
    return packed.flatten(0, 1)


def _in_order(words: Tensor) -> Tensor:
    """int32 [count, out / 8] -> uint8 [out, count]."""
    halves = nibbles_of(bytes_of(words)).unflatten(-1, (-1, _IN_A_WORD))
    return copied(halves[..., _VALUE_OF_ROW].flatten(-2).t())
