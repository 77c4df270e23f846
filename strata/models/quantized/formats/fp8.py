"""`quant_method: fp8`: e4m3 with one scale for a weight, or for each block of it (DeepSeek, Qwen, transformers).

Scales multiply, "inv" in their name or not (transformers 5.23, integrations/finegrained_fp8.py, read 2026-11-22).
"""

from __future__ import annotations

from typing import Any

import torch

from strata.files.fields import Fields
from strata.kernels.quant.quantized import Scheme
from strata.models.checkpoint import StoredTensor
from strata.models.quantized.formats.matrices import QuantizedMatrix, ScaledMatrix
from strata.models.quantized.formats.settings import take_cache, take_names
from strata.models.quantized.formats.stored import FLOATS, ONE, StoredTensors

# Of the scale beside a weight; of those of activations, which are for one scale of all tokens.
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")


def read_fp8(fields: Fields, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """The matrices of a checkpoint, by name.

    Activations are rounded as a product reads them: by the blocks of a weight's columns, by rows, or, where the scheme
    is static, with the scale that the file has for them.
    """
    block = _take_block(fields)
    static = fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    if static and block:
        raise fields.wrong("activation_scheme", "static", "'dynamic' where weights have a scale for each block")
    fields.choice("fmt", ("e4m3", "float8_e4m3fn", None), None)
    fields.choice("scale_fmt", ("float", "ue8m0", None), None)  # the scales' dtype tells it
    fields.only("expert_dtype", "fp8", "experts in 4 bits are not implemented in this format")
    take_names(fields, "modules_to_not_convert", "ignored_layers", "modules_to_convert")  # the dtypes tell it
    take_cache(fields, stored, "kv_cache_scheme")
    fields.finish({"dequantize"})
    return {
        f"{owner}.weight": _matrix(stored, owner, block, static)
        for owner in stored.owners("weight", torch.float8_e4m3fn)
    }


def scalar_matrix(stored: StoredTensors, values: StoredTensor, scales: str) -> ScaledMatrix:
    """Of e4m3 values with one scale for all, which is called so; what it multiplies is rounded by rows."""
    scale = stored.take(scales, FLOATS, *ONE)
    return ScaledMatrix(stored, Scheme("e4m3", 0, 0, "row"), values, scale)


def _matrix(stored: StoredTensors, owner: str, block: tuple[int, int] | None, static: bool) -> QuantizedMatrix:
    values = stored.take(f"{owner}.weight", (torch.float8_e4m3fn,), dims=2)
    name = next((name for last in _SCALES if (name := f"{owner}.{last}") in stored), f"{owner}.{_SCALES[0]}")
    if block is None:
        if static:
            stored.take_input_scale(owner, *_INPUT_SCALES)
        for last in _INPUT_SCALES:
            stored.pass_over(f"{owner}.{last}")
        return scalar_matrix(stored, values, name)
    (out, width), (rows, columns) = values.shape, block
    dtypes = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)
    scales = stored.take(name, dtypes, (-(-out // rows), -(-width // columns)))
    return ScaledMatrix(stored, Scheme("e4m3", rows, columns, "block"), values, scales)


def _take_block(fields: Fields) -> tuple[int, int] | None:
    value: Any = fields.take("weight_block_size", None)
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(type(one) is int and one > 0 for one in value)):
        raise fields.wrong("weight_block_size", value, "two positive integers, or null for one scale a weight")
    return value[0], value[1]
