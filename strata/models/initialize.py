"""First values of the parameters: for training from scratch, and dummies for measuring speed without a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.models.layers import CausalLM

_STD = 0.02


@torch.no_grad()
def initialize(model: CausalLM, seed: int) -> None:
    """Values to train from: matrices normal with deviation 0.02, biases 0, norms 1.

    The projections that end a residual branch are scaled by 1 / sqrt(2 * layers) (GPT-2, Radford et al. 2019). The
    numbers are drawn on the CPU in float32, so a seed means the same model on every device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    residual = _STD / (2 * len(model.model.layers)) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            _fill_vector(name, parameter)
        else:
            std = residual if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")) else _STD
            parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(0, std, generator=generator))


@torch.no_grad()
def randomize(model: CausalLM, seed: int) -> None:
    """Dummy weights, drawn on the device of each parameter: matrices normal with deviation 0.02, biases 0, norms 1."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            _fill_vector(name, parameter)
        else:
            device = parameter.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(seed))
            parameter.normal_(0, _STD, generator=generator)


def _fill_vector(name: str, vector: Tensor) -> None:
    vector.fill_(0.0 if name.endswith(".bias") else 1.0)
