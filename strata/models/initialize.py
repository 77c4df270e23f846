"""First values of the parameters: for training from scratch, and dummies for measuring speed without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from strata.models.family.mamba2 import StateSpace
from strata.models.family.qwen3_next import GatedDeltaNet
from strata.models.layers import CausalLM

_STD = 0.02


@torch.no_grad()
def initialize(model: CausalLM, seed: int) -> None:
    """The model's parameters become `initial_values`."""
    values = initial_values(model, seed)
    for parameter, (_, value) in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


def initial_values(model: CausalLM, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Values to train from, parameter by parameter: matrices normal with deviation 0.02, biases and sinks 0, norms 1 (0
    where they add 1 to their weights); other vectors, and the deviation of convolutions, as their modules say.

    The projections that end a residual branch are scaled by 1 / sqrt(2 * layers) (GPT-2, Radford et al. 2019). The
    numbers are drawn on the CPU in float32, so a seed means the same model on every device. The model, whole, may be on
    the meta device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    residual = _STD / (2 * len(model.model.layers)) ** 0.5
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        if parameter.dim() == 1 or name.endswith("_bias"):
            _fill_vector(model, name, value)
        else:
            ends = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj"))
            std = getattr(_owner(model, name), "deviation", residual if ends else _STD)
            value.normal_(0, std, generator=generator)
        yield name, value


def dummy_values(
    model: CausalLM, seed: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """Values for measuring speed, drawn on the device, parameter by parameter: matrices normal with deviation 0.02,
    biases 0, norms 1. `model` may be on the meta device. The numbers of one dtype are not those of another.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() == 1 or name.endswith("_bias"):
            _fill_vector(model, name, value)
        else:
            value.normal_(0, _STD, generator=generator)
        yield name, value


def _owner(model: CausalLM, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _fill_vector(model: CausalLM, name: str, vector: Tensor) -> None:
    """A norm multiplies by 1 in the beginning, whatever it adds to its weights."""
    owner = _owner(model, name)
    if isinstance(owner, StateSpace | GatedDeltaNet):
        vector.copy_(owner.first_values(name.rpartition(".")[2]))
        return
    vector.fill_(0.0 if name.endswith(("bias", "sinks")) else 1.0 - getattr(owner, "offset", 0.0))
