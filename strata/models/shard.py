"""A part of a model: what one rank holds where several share a model's matrices, or its layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from strata.models.config import ModelConfig
from strata.models.layers import CausalLM

Box = tuple[tuple[int, int], ...]  # first and end along every dimension
Boxes = tuple[Box, ...]  # which lie one after another along the dimension in which they differ


class ModelShard(Protocol):
    """Which part of a model is wanted: a smaller model of the same parameter names, and where its matrices lie."""

    @property
    def config(self) -> ModelConfig:
        """Of the part."""

    def build(self, max_length: int | None) -> CausalLM:
        """The part on the current default device, as `strata.models.families.build` makes a model."""

    def boxes(self, name: str, shape: tuple[int, ...]) -> Boxes:
        """What the part holds of a matrix (or vector) that a checkpoint has whole, as `shape`.

        name: of the parameter that it belongs to. Boxes may be smaller than the part's own tensor, at whose beginning
        they lie then; the rest is zeros. Asked of those matrices alone that the part has: of experts, the ones held.
        """


def keep_layers(model: CausalLM, first: int, end: int) -> CausalLM:
    """Leave a model only what the stage of layers [first, end) computes with, under the same names, in place; returns
    `model`.

    The first stage has the embedding, the last one the last norm and the head; of a model whose head is the embedding,
    both have that. No such part runs by itself: see `strata.graph.ranks.stages`.
    """
    decoder, last = model.model, end == len(model.model.layers)
    tied = model.lm_head is None
    # Not a list: layers keep their numbers and so their names.
    decoder.layers = nn.ModuleDict({str(layer): decoder.layers[layer] for layer in range(first, end)})  # type: ignore[assignment]
    absent: list[tuple[nn.Module, str]] = []
    if first and not (tied and last):
        absent.append((decoder, "embed_tokens"))
    if not last:
        absent += [(decoder, "norm"), (model, "lm_head")]
    for owner, name in absent:
        setattr(owner, name, None)
    return model


def whole(shape: tuple[int, ...]) -> Box:
    """The box of all of a tensor."""
    return tuple((0, size) for size in shape)


def places(target: Tensor, boxes: Boxes) -> list[tuple[Box, Tensor]]:
    """Each box, and the part of `target` that its values are in."""
    found, filled = [], 0
    along = differing(boxes)
    for box in boxes:
        sizes = [end - first for first, end in box]
        slices = [slice(size) for size in sizes]
        slices[along] = slice(filled, filled + sizes[along])
        found.append((box, target[tuple(slices)]))
        filled += sizes[along]
    return found


def zeroed_places(target: Tensor, boxes: Boxes) -> list[tuple[Box, Tensor]]:
    """The same of values that are to be put there; zeros are put into what none goes to."""
    found = places(target, boxes)
    if sum(place.numel() for _, place in found) != target.numel():
        target.zero_()
    return found


def differing(boxes: Boxes) -> int:
    """The dimension along which boxes lie one after another; the first, if there is one box."""
    return next((dim for dim, ranges in enumerate(zip(*boxes, strict=True)) if len(set(ranges)) > 1), 0)


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, end) for first, end in box)
