"""`quant_method: gptq`: integers of 4 or 8 bits with scales and zeros of groups of columns, in an order of their own.

qweight: int32 [width * bits / 32, out], the first column in the lowest bits. qzeros: int32 [groups, out * bits / 32].
scales: [groups, out]. g_idx: the group of each column. A weight is (q - zero) * scale. Layout "gptq" (v1) stores zeros
less one, "gptq_v2" as they are (GPTQModel 7.7.0, nn_modules/qlinear, utils/model.py, read 2026-11-23).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strata.files.fields import Fields
from strata.models.quantized.formats.matrices import QuantizedMatrix, WordMatrix, check_fills_bytes, scheme_of_words
from strata.models.quantized.formats.settings import HOW_MADE, take_group, take_object
from strata.models.quantized.formats.stored import FLOATS, StoredTensors

_BITS = (4, 8)
_V1, _V2 = "gptq", "gptq_v2"
# A 1 in each field of a word: of 4 bits, of 8.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class _Settings:
    """group: columns that share a scale, 0: all. symmetric: zeros are in the middle. ordered: columns of a group may
    stand anywhere. less_one: zeros are stored so."""

    bits: int
    group: int
    symmetric: bool
    ordered: bool
    less_one: bool


def read_gptq(fields: Fields, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """The matrices of a checkpoint, by name.

    Where zeros are in the middle (`sym`), what the file calls its layout is not believed: files of "gptq" hold either
    (vllm-project/vllm#38966, 2026-04). Where they are not, v1 is taken of GPTQModel alone, since AutoGPTQ's files of
    that kind are damaged (AutoGPTQ/AutoGPTQ#640, 2024-04).
    """
    bits = fields.choice("bits", _BITS)
    group = take_group(fields, "group_size")
    symmetric, ordered = fields.flag("sym", True), fields.flag("desc_act", False)
    layouts = [fields.choice(key, (_V1, _V2, None), None) for key in ("checkpoint_format", "format")]
    layout = layouts[0] or layouts[1] or _V1
    rules = take_object(fields, "dynamic")
    writer = take_object(fields, "meta").get("quantizer")
    fields.only("pack_dtype", "int32", "other words are not implemented")
    for key in ("is_marlin_format", "use_marlin"):
        fields.only(key, False, "this layout is for one kernel")
    fields.only("method", "gptq", "quant_method says so")
    for key in ("activation", "adapter", "rotation"):
        fields.only(key, None, "weights alone are read")
    fields.finish(HOW_MADE)
    settings = _Settings(bits, group, symmetric, ordered, layout == _V1)
    matrices: dict[str, QuantizedMatrix] = {}
    for owner in stored.owners("qweight"):
        own = _settings_of(owner, settings, rules, fields.where)
        if not own.symmetric and own.less_one and "gptqmodel" not in str(writer):
            raise ValueError(
                f"{fields.where}: sym = False with checkpoint_format = {_V1!r} is supported of GPTQModel's files alone "
                f"(meta.quantizer says {writer!r}); others are damaged where a zero is 0"
            )
        matrices[f"{owner}.weight"] = _matrix(stored, owner, own)
    return matrices


def _settings_of(owner: str, settings: _Settings, rules: Mapping[str, Any], where: str) -> _Settings:
    """Of a module: what the first rule that its name matches changes. A rule that begins with "-:" leaves it plain."""
    for pattern, changes in rules.items():
        try:
            matches = re.match(pattern.removeprefix("-:").removeprefix("+:"), owner)
        except re.error as error:
            raise ValueError(f"{where}: dynamic holds {pattern!r}, which is no regular expression: {error}") from None
        if not matches:
            continue
        if pattern.startswith("-:"):
            raise ValueError(
                f"{where}: dynamic leaves {owner} plain by {pattern!r}, but its file holds {owner}.qweight"
            )
        if not isinstance(changes, dict):
            raise ValueError(f"{where}: dynamic gives {pattern!r} = {changes!r}; accepted is an object")
        own = Fields(changes, f"{where}, dynamic, {pattern!r}")
        settings = replace(
            settings,
            bits=own.choice("bits", _BITS, settings.bits),
            group=take_group(own, "group_size") if own.has("group_size") else settings.group,
            symmetric=own.flag("sym", settings.symmetric),
            ordered=own.flag("desc_act", settings.ordered),
        )
        own.finish(HOW_MADE)
        return settings
    return settings


def _matrix(stored: StoredTensors, owner: str, settings: _Settings) -> QuantizedMatrix:
    bits, group = settings.bits, settings.group
    values = stored.take(f"{owner}.qweight", (torch.int32,), dims=2)
    words, out = values.shape
    width = words * 32 // bits
    check_fills_bytes(values.name, width)
    groups = -(-width // group) if group else 1
    scales = stored.take(f"{owner}.scales", FLOATS, (groups, out))
    zeros = stored.take(f"{owner}.qzeros", (torch.int32,), (groups, -(-out * bits // 32)))
    order = None
    if f"{owner}.g_idx" in stored or (settings.ordered and group):
        order = stored.take(f"{owner}.g_idx", (torch.int32, torch.int64), (width,))
    scheme = scheme_of_words(bits, group)
    return _GptqMatrix(stored, bits, scheme, (out, width), values, scales, zeros, order, settings)


@dataclass(frozen=True)
class _GptqMatrix(WordMatrix):
    settings: _Settings

    turned = True

    def _zeros(self, first: int, end: int) -> Tensor | None:
        settings, middle = self.settings, 1 << (self.bits - 1)
        assert self.zeros is not None
        if not settings.symmetric:
            # Of whole words, as they were taken off: a zero of 0 borrowed from its neighbour.
            less = _ONES[self.bits] if settings.less_one else 0
            return self._signed(self._zero_codes(self.zeros, first, end, less))
        zeros = self._zero_codes(self.zeros, first, end)
        if not any(bool((zeros == one).all()) for one in (middle - 1, middle)):
            raise ValueError(
                f"{self.zeros.file}: {self.zeros.name} holds zeros other than {middle} (in v1 {middle - 1}), "
                f"though quantization_config says sym = true"
            )
        return None
