"""Which matrices of a layer are products that can be rounded, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from strata.models.experts import BiasedExperts, Experts, has_joined_experts, stored_views
from strata.models.family.deepseek import LatentAttention
from strata.models.joined import joined_names
from strata.models.layers import CausalLM, Linear

GATE_UP, DOWN = "gate_up", "down"


@dataclass(frozen=True)
class Matrix:
    """A matrix [outputs, inputs] that checkpoints have apart, or as some rows of a joined one.

    name: that of its tensor in a checkpoint. module: of the layer, that multiplies by it. expert, side: of the experts
    that the module has, which one's it is, and GATE_UP or DOWN; None and "" of others.
    """

    name: str
    module: str
    shape: tuple[int, int]
    expert: int | None = None
    side: str = ""


def layer_prefix(number: int) -> str:
    return f"model.layers.{number}."


def layer_views(model: CausalLM, number: int) -> Iterator[tuple[str, str, Tensor]]:
    """Of each tensor of a layer: its name in a checkpoint, that of its parameter in the layer, and its values."""
    for own, parameter in model.model.layers[number].named_parameters():
        for name, view in stored_views(model, layer_prefix(number) + own, parameter):
            yield name, own, view.detach()


def products(model: CausalLM, number: int) -> list[Matrix]:
    """The matrices of a layer that can be rounded; the model may be on the meta device.

    Not among them: routers and gates of one output, which decide; `kv_b_proj` of latent attention, an operand of the
    attention; and experts that checkpoints hold all in one tensor, for which compressed-tensors has no form.
    """
    modules = dict(model.model.layers[number].named_modules())
    one_tensor = has_joined_experts(model)
    found: list[Matrix] = []
    counts: dict[str, int] = {}
    for name, own, view in layer_views(model, number):
        path, _, last = own.rpartition(".")
        module = modules[path]
        if not name.endswith(".weight") or view.dim() != 2:
            continue
        shape = (view.shape[0], view.shape[1])
        if isinstance(module, Experts | BiasedExperts) and not one_tensor:
            place = counts[own] = counts.get(own, -1) + 1
            expert, side = (place // 2, GATE_UP) if last == "gate_up_proj" else (place, DOWN)
            found.append(Matrix(name, path, shape, expert, side))
        elif isinstance(module, Linear) and shape[0] > 1:
            above = modules[path.rpartition(".")[0]]
            if not (isinstance(above, LatentAttention) and path.endswith(".kv_b_proj")):
                found.append(Matrix(name, path, shape))
    return found


def is_skipped(matrix: Matrix, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern, as of file names, fits the name in a checkpoint or that without ".weight"."""
    names = (matrix.name, matrix.name.removesuffix(".weight"))
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def homes(model: CausalLM, matrices: list[Matrix]) -> dict[str, list[str]]:
    """By the name of each tensor of a checkpoint, the matrices whose rows it holds one above the other."""
    everything = dict.fromkeys(matrix.name for matrix in matrices)
    joined = dict(joined_names(model, everything))
    parts = {part for names in joined.values() for part in names}
    return joined | {name: [name] for name in everything if name not in parts}
