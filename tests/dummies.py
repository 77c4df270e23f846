"""Models with the weights that an engine with load_format="dummy" has."""

from __future__ import annotations

import torch

from strata.models.initialize import dummy_values
from strata.models.layers import CausalLM


@torch.no_grad()
def randomize(model: CausalLM, seed: int) -> None:
    """The parameters, of one device and dtype, become `dummy_values`."""
    like = next(model.parameters())
    values = dummy_values(model, seed, like.device, like.dtype)
    for parameter, (_, value) in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)
