"""AdamW over float32 master weights, with the gradient clipped by its norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata.train.config import OptimizerConfig
from strata.train.optimizer.part_optimizer import EMBEDDING


class Optimizer:
    """Holds what a step changes besides the model: masters, their gradients, the two moments.

    A float32 model is its own master. For a bfloat16 model the masters are separate float32 tensors; after a step the
    model is their rounding, and gradients of several backward passes add up in float32. Weight decay applies to
    matrices except the embedding: decay of norms and of rows that a step has not seen would only shrink them.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, masters: dict[str, Tensor] | None = None) -> None:
        """masters: the float32 weights by name when they are not the model's own (see `masters_of`)."""
        self._config = config
        self._parameters = dict(model.named_parameters())
        self._separate = any(parameter.dtype != torch.float32 for parameter in self._parameters.values())
        if self._separate:
            given = masters if masters is not None else masters_of(model)
            self.masters = {name: nn.Parameter(given[name]) for name in self._parameters}
        else:
            self.masters = dict(self._parameters)
        decays = {name: master.dim() > 1 and name != EMBEDDING for name, master in self.masters.items()}
        groups = [
            {"params": [self.masters[name] for name in decays if decays[name]], "weight_decay": config.weight_decay},
            {"params": [self.masters[name] for name in decays if not decays[name]], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._publish()

    def accumulate(self) -> None:
        """Add the model's gradients to the masters' and clear them. Call after every backward pass."""
        if not self._separate:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def step(self, learning_rate: float) -> Tensor:
        """Clip, update, publish to the model, clear the gradients. Returns the norm before clipping, on the device."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        norm = nn.utils.clip_grad_norm_(self.masters.values(), self._config.clip)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._publish()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Masters (when separate) and moments by name, as a checkpoint stores them."""
        tensors = {}
        for name, master in self.masters.items():
            if self._separate:
                tensors[f"master.{name}"] = master.detach()
            moments = self._adamw.state[master]
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = moments[moment] if moment in moments else torch.zeros_like(master)
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Continue after `steps` steps from what `state` gave. Raises ValueError if it is another model's."""
        if tensors.keys() != self.state().keys():
            raise ValueError(
                "the optimizer state is of another model or precision; resume with the config and device of the run"
            )
        for name, master in self.masters.items():
            if self._separate:
                master.copy_(tensors[f"master.{name}"])
            self._adamw.state[master] = {
                "step": torch.tensor(float(steps), dtype=torch.float32, device=master.device),
                "exp_avg": tensors[f"exp_avg.{name}"].to(master.device, copy=True),
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(master.device, copy=True),
            }
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        if self._separate:
            for name, parameter in self._parameters.items():
                parameter.copy_(self.masters[name])


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    """Float32 copies of the parameters; take them before the model is rounded."""
    return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
