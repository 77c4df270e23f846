"""AdamW and Muon of one process, written plainly from their papers: a loop over whole parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from strata.train.optimizer.config import OptimizerConfig


def plain_step(
    model: nn.Module, state: dict[str, Tensor], config: OptimizerConfig, rate: float, step: int, scale: float
) -> None:
    """Change the parameters by their gradients times `scale`. state: empty at first. step: counted from 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad * scale
            is_matrix = parameter.dim() > 1
            decay = config.weight_decay if is_matrix and name != "model.embed_tokens.weight" else 0.0
            if config.name == "muon" and is_matrix and ".layers." in name:
                buffer = state.setdefault(f"momentum.{name}", torch.zeros_like(parameter))
                buffer.copy_(config.momentum * buffer + (1 - config.momentum) * gradient)
                ahead = config.momentum * buffer + (1 - config.momentum) * gradient
                change = torch.empty_like(parameter)
                for matrix, result in zip(matrices(name, ahead), matrices(name, change), strict=True):
                    result.copy_(0.2 * max(matrix.shape) ** 0.5 * newton_schulz(matrix))
            else:
                first = state.setdefault(f"exp_avg.{name}", torch.zeros_like(parameter))
                second = state.setdefault(f"exp_avg_sq.{name}", torch.zeros_like(parameter))
                first.copy_(config.beta1 * first + (1 - config.beta1) * gradient)
                second.copy_(config.beta2 * second + (1 - config.beta2) * gradient**2)
                size = (second / (1 - config.beta2**step)).sqrt() + config.eps
                change = first / (1 - config.beta1**step) / size
            parameter.copy_(parameter - rate * decay * parameter - rate * change)


def matrices(name: str, parameter: Tensor) -> Iterator[Tensor]:
    """Views; experts apart, and gate and up of each."""
    if parameter.dim() == 2:
        yield parameter
        return
    for expert in parameter:
        yield from expert.chunk(2) if "gate_up" in name else (expert,)


def newton_schulz(matrix: Tensor) -> Tensor:
    """Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"."""
    x = matrix / (torch.sqrt((matrix**2).sum()) + 1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * (a @ x) + 2.0315 * (a @ a @ x)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
