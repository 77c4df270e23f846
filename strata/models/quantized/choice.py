"""Which parameters of a model are packed, of those that products alone read, and the modules that hold them so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from strata.kernels.quant.quantized import QuantizedWeight, Scheme
from strata.models.experts import ExpertRouter, Experts, has_joined_experts, stored_views
from strata.models.layers import CausalLM
from strata.models.quantized.checkpoint import Checkpoint

_HEAD = "lm_head.weight"


def quantized_by(scheme: Scheme, products: Iterable[str], model: CausalLM) -> dict[str, Scheme]:
    """The scheme of all products but the head and routers, of which errors would change which token or expert is
    chosen."""
    return {name: scheme for name in products if name != _HEAD and not _is_of_router(model, name)}


def pruned(products: Iterable[str], complete: CausalLM) -> list[str]:
    """The products that `strata prune` prunes: not gates of one output, nor experts that the family's checkpoints hold
    in one tensor (gpt-oss, Granite)."""
    return [
        name
        for name in products
        if len(complete.get_parameter(name)) > 1 and not (".experts." in name and _in_one_tensor(complete, name))
    ]


def quantized_there(
    checkpoint: Checkpoint, products: Iterable[str], complete: CausalLM, layers: CausalLM
) -> dict[str, Scheme]:
    """The schemes of the products of which a checkpoint has all matrices packed, but for a head that ranks cannot
    divide evenly, of which the last rows are zeros, and for experts of which others are not packed.

    layers: `complete` as ranks divide it, or itself.
    """
    format = checkpoint.format
    assert format is not None
    schemes = {}
    for name in products:
        parameter = complete.get_parameter(name)
        stored = [one for one, _ in stored_views(complete, name, parameter)]
        has_zeros = name == _HEAD and len(parameter) % len(layers.get_parameter(name))
        if not has_zeros and all(checkpoint.is_quantized(one) for one in stored):
            schemes[name] = format.scheme_of(checkpoint.sources[stored[0]].name)
    return {name: scheme for name, scheme in schemes.items() if _multiplied_with(complete, name) <= schemes.keys()}


def hold_quantized(model: nn.Module, packed: Mapping[str, QuantizedWeight]) -> None:
    """Let modules hold packed weights in the place of these parameters, which products alone read.

    They are no parameters then: a cast or a move of the model passes them over.
    """
    for name, weight in packed.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        delattr(module, last)
        setattr(module, last, weight)


def _multiplied_with(complete: CausalLM, name: str) -> set[str]:
    """The parameters of the operation that multiplies by this one: of experts both, which are packed or are not."""
    owner = name.rpartition(".")[0]
    if not isinstance(complete.get_submodule(owner), Experts):
        return {name}
    return {f"{owner}.gate_up_proj", f"{owner}.down_proj"}


def _is_of_router(model: CausalLM, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), ExpertRouter)


def _in_one_tensor(model: CausalLM, name: str) -> bool:
    return has_joined_experts(model) or next(stored_views(model, name, model.get_parameter(name)))[1].dim() > 2
