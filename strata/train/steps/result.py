"""What a training loop sees of a step: tensors, and their values, which are read when the device has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """Tensors on the device that nobody has waited for yet, alike on all ranks.

    loss: [] the mean over the counted tokens of the whole step, of all ranks and packs. norm: [] of the whole gradient
    before clipping; a step whose norm is not finite changes nothing. metrics: by name, [] each.
    """

    loss: Tensor
    norm: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """Loss, gradient norm before clipping, and what else the step says of itself, of the step with this number."""

    step: int
    loss: float
    norm: float
    metrics: Mapping[str, float]


class Results:
    """A queue of readings. `ready(behind=n)` gives those that are at least `n` steps old, oldest first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[tuple[int, tuple[str, ...], Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, result: StepResult) -> None:
        """Begin to copy a result to the host."""
        values = torch.stack([one.detach().float() for one in (result.loss, result.norm, *result.metrics.values())])
        arrived = None
        if self._device.type == "cuda":
            host = torch.empty(values.shape, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((step, tuple(result.metrics), values, arrived))

    def ready(self, *, behind: int) -> Iterator[Reading]:
        """Waits for the device where a reading has not arrived."""
        while len(self._waiting) > behind:
            step, names, values, arrived = self._waiting.popleft()
            if arrived is not None:
                arrived.synchronize()
            loss, norm, *rest = values.tolist()
            yield Reading(step, loss, norm, dict(zip(names, rest, strict=True)))

    def discard(self) -> None:
        """Drop what waits: the run goes back to before."""
        self._waiting.clear()
