"""`quant_method: modelopt`, of NVIDIA's Model Optimizer: fp8 with one scale a weight, and nvfp4.

Layouts: modelopt 0.47.0, torch/export (read 2026-11-22). `weight_scale_2` multiplies, unlike the global scale of
compressed-tensors.
"""

from __future__ import annotations

import torch

from strata.files.fields import Fields
from strata.kernels.quant.quantized import NV_GROUP, Scheme
from strata.models.quantized.formats.fp8 import scalar_matrix
from strata.models.quantized.formats.matrices import QuantizedMatrix, ScaledMatrix
from strata.models.quantized.formats.settings import take_cache, take_names, take_object
from strata.models.quantized.formats.stored import StoredTensors

_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")


def read_modelopt(fields: Fields, stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """The matrices of a checkpoint, by name.

    fields: the quantization_config, or `quantization` of hf_quant_config.json. Activations in fp8 are rounded with the
    scale that the file has for them, or by rows; those in 4 bits are not, whatever scale it has.
    """
    algorithm = fields.choice("quant_algo", _ALGORITHMS)
    if algorithm != "FP8" and fields.count("group_size", NV_GROUP) != NV_GROUP:
        raise ValueError(f"{fields.where}: group_size of {algorithm} is not {NV_GROUP}")
    take_cache(fields, stored, "kv_cache_quant_algo", "kv_cache_scheme")
    take_names(fields, "exclude_modules", "ignore")  # the dtypes tell it
    take_object(fields, "config_groups")  # says of each group what quant_algo says
    fields.finish({"producer"})
    if algorithm == "FP8":
        return {f"{owner}.weight": _scalar(stored, owner) for owner in stored.owners("weight", torch.float8_e4m3fn)}
    return {f"{owner}.weight": _nvfp4(stored, owner) for owner in stored.owners("weight", torch.uint8)}


def _scalar(stored: StoredTensors, owner: str) -> QuantizedMatrix:
    values = stored.take(f"{owner}.weight", (torch.float8_e4m3fn,), dims=2)
    if f"{owner}.input_scale" in stored:
        stored.take_input_scale(owner, "input_scale")
    return scalar_matrix(stored, values, f"{owner}.weight_scale")


def _nvfp4(stored: StoredTensors, owner: str) -> QuantizedMatrix:
    values = stored.take(f"{owner}.weight", (torch.uint8,), dims=2)
    out, half = values.shape
    if 2 * half % NV_GROUP:
        raise ValueError(f"{stored.folder}: groups of {NV_GROUP} do not divide the {2 * half} columns of {owner}")
    scales = stored.take(f"{owner}.weight_scale", (torch.float8_e4m3fn,), (out, 2 * half // NV_GROUP))
    whole = stored.take(f"{owner}.weight_scale_2", (torch.float32,), (), (1,))
    stored.pass_over(f"{owner}.input_scale")
    return ScaledMatrix(stored, Scheme("e2m1", 1, NV_GROUP), values, scales, whole=(whole, False))
