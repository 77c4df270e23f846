"""Models that are not tried on a processor unless somebody asks for that: they would take hours there, silently."""

from __future__ import annotations

import torch

from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.weights import weight_bytes

# Of the built-in model a processor makes thousands of tokens a second, of 0.6B tens; beyond these a few at most.
MAX_PARAMETERS = 2e9


def is_left_to_processor(device: str) -> bool:
    """Whether a device that nobody named is the processor."""
    return device == "auto" and not torch.cuda.is_available()


def why_no_processor(config: ModelConfig, device: str) -> str | None:
    """Why a model is not tried on this machine, in words; None if it is. device: as it was asked for: "auto" asks for a
    GPU where a model needs one."""
    if not is_left_to_processor(device):
        return None
    with torch.device("meta"):
        parameters = weight_bytes(build(config), torch.bfloat16) // torch.bfloat16.itemsize
    if parameters <= MAX_PARAMETERS:
        return None
    return (
        f"it needs a GPU, and this machine has none: on a processor {parameters / 1e9:,.1f} billion "
        "parameters take hours"
    )


def require_gpu(model: str, config: ModelConfig, device: str, option: str = "--device cpu") -> None:
    """Raises ValueError, before anything is loaded, for a model that is not tried here. option: that tries it."""
    if (why := why_no_processor(config, device)) is not None:
        raise ValueError(f"{model}: {why}; take a smaller model, or give {option} to do it all the same")
