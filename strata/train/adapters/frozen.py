"""The model under adapters: frozen, and with packed weights where the run or its checkpoint says so (QLoRA, Dettmers et
al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from strata.graph.quantize import weights_of_products
from strata.graph.trace import trace
from strata.kernels.quant.quantized import QuantizedWeight, Scheme
from strata.kernels.quant.schemes import scheme_of
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.quantized.assembly import meta_weights
from strata.models.quantized.checkpoint import Checkpoint, quantized_format
from strata.models.quantized.choice import quantized_by, quantized_there
from strata.models.weights import WeightStore


def check_weights(folder: Path, config: ModelConfig, *, trains_adapters: bool, quantization: str | None) -> None:
    """Raises ValueError, before any weight is read, if a run cannot begin with the weights of a folder: packed ones
    that it would train themselves, or that it would pack once more; a parameter that cannot be packed.

    quantization: the scheme by which the run packs, or None.
    """
    if not trains_adapters:
        if (format := quantized_format(folder)) is not None:
            raise ValueError(
                f"{folder} holds packed weights ({format.scheme}), and only adapters are trained beside these: add a "
                "[lora] table, or start from a model in floats"
            )
        return
    planned_weights(folder, config, quantization)


def planned_weights(folder: Path, config: ModelConfig, quantization: str | None) -> dict[str, QuantizedWeight]:
    """By parameter on the meta device what a run's frozen model will hold packed. Raises ValueError, see
    `check_weights`."""
    with torch.device("meta"):
        model = build(config)
    schemes, checkpoint = _schemes(folder, model, quantization)
    return meta_weights(model, model, None, schemes, checkpoint)


def load_frozen(
    folder: Path, config: ModelConfig, quantization: str | None, device: torch.device, dtype: torch.dtype
) -> tuple[CausalLM, dict[str, QuantizedWeight]]:
    """The model of a folder on a device, in `dtype`, but for what is packed, which is on the meta device there: that by
    itself, for `hold_quantized`.

    Activations are not rounded, whatever a scheme says of serving. Raises ValueError as `WeightStore.load` does.
    """
    with torch.device("meta"):
        schemes, _ = _schemes(folder, build(config), quantization)
    store = WeightStore.load(folder, schemes, device, dtype)
    return store.model, {name: weight._replace(activations="") for name, weight in store.quantized.items()}


def quantized_line(packed: Mapping[str, QuantizedWeight], dtype: torch.dtype) -> str:
    """What a model of this dtype holds packed, for people."""
    held = packed.values()
    kinds = ", ".join(sorted({weight.kind for weight in held}))
    size, elements = sum(weight.nbytes for weight in held), sum(weight.numel() for weight in held)
    return (
        f"frozen weights: {len(held):,} are packed ({kinds}), {size / 2**30:.3f} GiB instead of "
        f"{elements * dtype.itemsize / 2**30:.3f} in {str(dtype).removeprefix('torch.')}"
    )


def _schemes(folder: Path, model: CausalLM, quantization: str | None) -> tuple[dict[str, Scheme], Checkpoint | None]:
    """Of the parameters that are packed; and the checkpoint, if it has them so. model: on the meta device."""
    format = quantized_format(folder)
    if format is None and quantization is None:
        return {}, None
    products = weights_of_products([trace(model)])  # not the head, of which the loss makes gradients itself
    if format is None:
        assert quantization is not None
        return quantized_by(scheme_of(quantization), products, model), None
    if quantization is not None:
        raise ValueError(
            f"lora.quantization = {quantization!r}: the weights of {folder} are packed already ({format.scheme}); "
            "leave it out"
        )
    checkpoint = Checkpoint.of(folder, model)
    return quantized_there(checkpoint, products, model, model), checkpoint
