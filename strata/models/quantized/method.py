"""Which method a `quantization_config` says that weights are packed by."""

from __future__ import annotations

from collections.abc import Collection

from strata.files.fields import Fields

# How checkpoints are packed that are served from packed weights (`strata.models.quantized.formats`).
QUANTIZED_METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt")


def take_method(fields: Fields, accepted: Collection[str]) -> str:
    """`quant_method`, which modelopt 0.31 left out: its configs alone have `quant_algo`. Raises ValueError for a method
    that is not accepted."""
    if not fields.has("quant_method") and fields.has("quant_algo"):
        fields.take("quant_method", None)
        return "modelopt"
    method: str = fields.choice("quant_method", accepted)
    return method
