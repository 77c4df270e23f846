"""Factors that a norm or a product divides by and the products behind it multiply by: found, and proved to be exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strata.models.experts import BiasedExperts, ExpertRouter, Experts
from strata.models.layers import MLP, Attention, Linear, RMSNorm, WideRMSNorm
from strata.models.quantized.calibrate.observe import LayerObserver

# Outputs of a layer may differ by so much of their largest, in float32, if a fold is exact.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Fold:
    """before: the module, a norm or a product, whose outputs are divided. after: those that multiply these outputs.

    Names are those within the layer.
    """

    before: str
    after: tuple[str, ...]


def norm_folds(observer: LayerObserver) -> list[Fold]:
    """Of every norm that a product reads directly."""
    return [Fold(norm, tuple(readers)) for norm, readers in observer.readers.items()]


def product_folds(layer: nn.Module) -> list[Fold]:
    """Of values before the attention's output, if every head has its own, and of `up` before `down`."""
    found = []
    for name, module in layer.named_modules():
        if isinstance(module, Attention) and module.v_proj.weight.shape[0] == module.o_proj.weight.shape[1]:
            found.append(Fold(f"{name}.v_proj", (f"{name}.o_proj",)))
        elif isinstance(module, MLP):
            found.append(Fold(f"{name}.up_proj", (f"{name}.down_proj",)))
    return found


def weights_after(layer: nn.Module, fold: Fold) -> list[Tensor]:
    """The matrices [out, width] that are multiplied by a fold's factors; routers among them."""
    return [weight for name in fold.after for weight in _weights(layer.get_submodule(name))]


def is_exact(layer: nn.Module, fold: Fold, run: Callable[[], Tensor]) -> bool:
    """Whether a layer makes the same of an input, `run()`, with the fold; tried with powers of 2, then taken back.

    It is not where something else, unknown here, reads what the module before has made.
    """
    kept = [parameter.detach().clone() for parameter in layer.get_submodule(fold.before).parameters()]
    width = weights_after(layer, fold)[0].shape[1]
    factors = torch.full((width,), 2.0, device=kept[0].device)
    factors[1::2] = 0.5
    expected = run()
    apply(layer, fold, factors)
    found = run()
    apply(layer, fold, 1 / factors)
    for parameter, value in zip(layer.get_submodule(fold.before).parameters(), kept, strict=True):
        parameter.detach().copy_(value)
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def apply(layer: nn.Module, fold: Fold, factors: Tensor) -> None:
    """Divide by factors [width] before, and multiply behind, in place."""
    before = layer.get_submodule(fold.before)
    if isinstance(before, WideRMSNorm):
        before.weight.detach().copy_((before.offset + before.weight) / factors - before.offset)
    elif isinstance(before, RMSNorm):
        before.weight.detach().div_(factors)
    else:
        assert isinstance(before, Linear)
        before.weight.detach().div_(factors[:, None])
        if before.bias is not None:
            before.bias.detach().div_(factors)
    for weight in weights_after(layer, fold):
        weight.mul_(factors)


def _weights(module: nn.Module) -> list[Tensor]:
    if isinstance(module, Experts | BiasedExperts):
        return list(module.gate_up_proj.detach().unbind(0))
    assert isinstance(module, Linear | ExpertRouter)
    return [module.weight.detach()]
