"""Packed weights as compressed-tensors 0.20 lays them out (its compressors/pack_quantized and naive_quantized)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from strata.kernels.quant.quantized import QuantizedWeight, Scheme

_WORD = 4
_BITS = {"int4": 4, "int8": 8, "e4m3": 8}


def stored_tensors(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors, on the CPU, that stand for the matrix `name`, which ends in ".weight".

    int4, and int8 whose activations are not rounded, as int32 words of 8 or 4 columns, the first in the lowest bits;
    others as they are.
    """
    values, scales, base = weight.values.cpu(), weight.scales.cpu().contiguous(), name.removesuffix(".weight")
    if not is_quantized(weight.scheme):
        return {name: values.contiguous(), f"{base}.weight_scale": scales}
    if weight.kind == "int8":
        values = (values.to(torch.int16) + 128).to(torch.uint8)
    words = pad(values, (0, -values.shape[-1] % _WORD)).contiguous().view(torch.int32)
    return {
        f"{base}.weight_packed": words,
        f"{base}.weight_scale": scales,
        f"{base}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def is_quantized(scheme: Scheme) -> bool:
    """Whether values are words of several columns."""
    return scheme.values == "int4" or (scheme.values == "int8" and not scheme.activations)


def quantization_config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. ignored: names of the linear modules that are not rounded."""
    kind = (
        "pack-quantized" if is_quantized(scheme) else "float-quantized" if scheme.values == "e4m3" else "int-quantized"
    )
    weights = _arguments(scheme) | {"dynamic": False}
    if scheme.rows > 1:
        weights |= {"strategy": "block", "block_structure": [scheme.rows, scheme.columns]}
    elif scheme.columns:
        weights |= {"strategy": "group", "group_size": scheme.columns}
    else:
        weights |= {"strategy": "channel"}
    activations = None
    if scheme.activations == "row":
        activations = _arguments(scheme) | {"dynamic": True, "strategy": "token"}
    elif scheme.activations == "block":
        activations = _arguments(scheme) | {"dynamic": True, "strategy": "group", "group_size": scheme.columns}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": kind,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _arguments(scheme: Scheme) -> dict[str, Any]:
    kind = "float" if scheme.values == "e4m3" else "int"
    return {"num_bits": _BITS[scheme.values], "type": kind, "symmetric": True}
