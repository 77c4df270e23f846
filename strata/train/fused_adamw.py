"""AdamW over float32 masters of a bfloat16 model, one pass over each parameter; its state is that of `Optimizer`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata.kernels.adamw import adamw
from strata.train.config import OptimizerConfig
from strata.train.optimizer.clip import clip_scale
from strata.train.optimizer.part_optimizer import EMBEDDING


class FusedAdamW:
    """Holds masters and moments, reads the model's own gradients, and writes the model's weights as it updates.

    The gradients of a step with one backward pass stay in the model's dtype and are not copied; those of several add up
    in float32 (`accumulate`). Weight decay applies to matrices except the embedding.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, masters: dict[str, Tensor]) -> None:
        """masters: float32 weights by name, which the optimizer keeps and changes."""
        self._config = config
        self._parameters = dict(model.named_parameters())
        self.masters = {name: masters[name] for name in self._parameters}
        self._first = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self._second = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self._sums: dict[str, Tensor] = {}
        device = next(iter(self.masters.values())).device
        # Learning rate, both bias corrections, what gradients are multiplied by: see `adamw`.
        self._step = torch.zeros(4, dtype=torch.float32, device=device)
        self._steps = 0
        self._publish()

    def step(self, learning_rate: float) -> Tensor:
        """Clip, update, clear the gradients. Returns the norm before clipping, [] float32 on the device."""
        self.begin(learning_rate)
        return self.update()

    def begin(self, learning_rate: float) -> None:
        """The part of a step that the host decides: rate and bias corrections."""
        self._steps += 1
        self._step[0].fill_(learning_rate)
        self._step[1].fill_(1 - self._config.beta1**self._steps)
        self._step[2].fill_(1 - self._config.beta2**self._steps)

    def accumulate(self) -> None:
        """Add the model's gradients to the float32 sums that the next update uses, and clear them."""
        for name, gradient in self._gradients().items():
            if name in self._sums:
                self._sums[name].add_(gradient)
            else:
                self._sums[name] = gradient.to(torch.float32, copy=True)
            self._parameters[name].grad = None

    @torch.no_grad()
    def update(self) -> Tensor:
        """The part that the device does, with the same launches in every step. Returns the norm before clipping.

        Where the norm is not finite nothing changes.
        """
        config = self._config
        gradients = self._sums or self._gradients()
        norms = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        self._step[3].copy_(clip_scale(norm, config.clip))
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            decay = config.weight_decay if parameter.dim() > 1 and name != EMBEDDING else 0.0
            adamw(
                parameter.detach(),
                self.masters[name],
                self._first[name],
                self._second[name],
                gradient,
                self._step,
                config.beta1,
                config.beta2,
                config.eps,
                decay,
            )
            parameter.grad = None
        self._sums = {}
        return norm

    def _gradients(self) -> dict[str, Tensor]:
        return {name: one.grad for name, one in self._parameters.items() if one.grad is not None}

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, as a checkpoint stores them."""
        kinds = {"master": self.masters, "exp_avg": self._first, "exp_avg_sq": self._second}
        return {f"{kind}.{name}": one for kind, tensors in kinds.items() for name, one in tensors.items()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Continue after `steps` steps from what `state` gave. Raises ValueError if it is another model's."""
        mine = self.state()
        if tensors.keys() != mine.keys():
            raise ValueError(
                "the optimizer state is of another model or precision; resume with the config and device of the run"
            )
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])
        self._steps = steps
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name])
