"""How much of what the second products of MLPs multiply is zero, or next to it: counted, nothing is done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strata.models.experts import Experts
from strata.models.layers import MLP
from strata.models.quantized.calibrate.observe import gated
from strata.models.quantized.calibrate.stream import LayerStream, batches_of

# Beside zeros, magnitudes under these parts of the largest of their row.
THRESHOLDS = (0.01, 0.1)


@dataclass(frozen=True)
class ActivationCounts:
    """Of a layer: values that second products multiply, zeros, and those under each of `THRESHOLDS` of their row."""

    layer: int
    values: int
    zeros: int
    small: tuple[int, ...]


@torch.no_grad()
def count_activations(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> list[ActivationCounts]:
    """Of each layer with an MLP or experts, while text runs through the model; one layer in memory, in float32.

    sequences: token ids. Raises ValueError as `LayerStream` and its `check_tokens` do, and if there is no text.
    """
    if not any(len(sequence) for sequence in sequences):
        raise ValueError("activations are counted while text runs through the model, and there is none")
    stream = LayerStream(folder, device)
    stream.check_tokens(sequences)
    batches = batches_of([sequence for sequence in sequences if len(sequence)])
    hidden, found = stream.embed(batches), []
    for number in range(stream.layers):
        counts: list[Tensor] = []
        with stream.opened(number) as layer:
            handles = _listen(layer, counts)
            hidden = [stream.run(number, batch, x).cpu() for batch, x in zip(batches, hidden, strict=True)]
            for handle in handles:
                handle.remove()
        if counts:
            values, zeros, *small = torch.stack(counts).sum(0).tolist()
            found.append(ActivationCounts(number, values, zeros, tuple(small)))
        report(number + 1, stream.layers)
    return found


def _listen(layer: nn.Module, counts: list[Tensor]) -> list[Any]:
    def of_mlp(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        counts.append(_count(given[0]))

    def of_experts(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Experts)
        x, _, chosen = given
        for number, gate_up in enumerate(module.gate_up_proj):
            counts.append(_count(gated(x[(chosen == number).any(-1)], gate_up)))

    mlps = [one for one in layer.modules() if isinstance(one, MLP)]
    handles = [one.down_proj.register_forward_pre_hook(of_mlp) for one in mlps]
    experts = [one for one in layer.modules() if isinstance(one, Experts)]
    return handles + [one.register_forward_pre_hook(of_experts) for one in experts]


def _count(x: Tensor) -> Tensor:
    sizes = x.abs()
    largest = sizes.amax(-1, keepdim=True) if sizes.numel() else sizes
    small = [(sizes < share * largest).sum() for share in THRESHOLDS]
    return torch.stack([torch.tensor(x.numel(), device=x.device), (x == 0).sum(), *small]).cpu()
