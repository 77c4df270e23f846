"""Which parameters each rank holds, of a model that pipeline, tensor and expert parallelism divide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from strata.comm.placement import Placement
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.parallel.families import placements, sharding_table
from strata.parallel.stages import layer_spans


@dataclass(frozen=True)
class RankParameters:
    """What a rank of a pipeline holds, in elements, after tp and ep have divided it; ZeRO not yet.

    layers: the numbers of those of its stages. unlike: of each kind of layer the number of one, and how many there are.
    in_layers: their parameters. dense: all outside experts, embedding and head among them. experts: of the experts.
    embedding, head: 0 where they lie on another rank; a tied embedding is the head of the last rank too, which computes
    with it, but a parameter of the first alone.
    """

    layers: tuple[int, ...]
    unlike: tuple[tuple[int, int], ...]
    in_layers: int
    dense: int
    experts: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def mean_layer(self) -> int:
        """The parameters of one layer."""
        return self.in_layers // len(self.layers)


# A search asks for the same ranks under many layouts.
@lru_cache(maxsize=1024)
def parameters_by_rank(
    config: ModelConfig, tp: int, ep: int, length: int, rank_of_stage: tuple[int, ...]
) -> tuple[RankParameters, ...]:
    """Of each rank of a pipeline. rank_of_stage: by stage, as in `PipelineSchedule`. length: of sequences, by which
    stages are cut.
    """
    model = meta_model(config)
    stages = len(rank_of_stage)
    spans = layer_spans(model, stages, length) if stages > 1 else [(0, config.num_layers)]
    elements = dict(_elements(config, model, tp, ep))
    tied_head = elements["model.embed_tokens.weight"] if config.tied else 0
    found = []
    for rank in range(max(rank_of_stage) + 1):
        own = [stage for stage, home in enumerate(rank_of_stage) if home == rank]
        layers = tuple(layer for stage in own for layer in range(*spans[stage]))
        prefixes = [f"model.layers.{layer}." for layer in layers]
        if 0 in own:
            prefixes.append("model.embed_tokens.")
        if stages - 1 in own:
            prefixes += ["model.norm.", "lm_head."]
        names = [name for name in elements if name.startswith(tuple(prefixes))]
        experts = sum(elements[name] for name in names if ".mlp.experts." in name)
        ends = [elements.get(f"{end}.weight", 0) for end in ("model.embed_tokens", "lm_head")]
        found.append(
            RankParameters(
                layers,
                _unlike(config, layers),
                sum(elements[name] for name in names if name.startswith("model.layers.")),
                sum(elements[name] for name in names) - experts,
                experts,
                ends[0] if 0 in own else 0,
                (ends[1] or tied_head) if stages - 1 in own else 0,
            )
        )
    return tuple(found)


@lru_cache(maxsize=2)
def meta_model(config: ModelConfig) -> CausalLM:
    """A model without weights, by which their shapes are known."""
    with torch.device("meta"):
        return build(config)


def _unlike(config: ModelConfig, layers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    kinds = config.layer_kinds
    numbers = {kinds[layer]: layer for layer in layers}
    counts = Counter(kinds[layer] for layer in layers)
    return tuple((layer, counts[kind]) for kind, layer in numbers.items())


def _elements(config: ModelConfig, model: nn.Module, tp: int, ep: int) -> Iterator[tuple[str, int]]:
    """Of each parameter, the most that a rank of tp and ep holds."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    placed = placements(shapes, sharding_table(config.architecture))
    for name, shape in shapes.items():
        dim, parts = placed[name].divided_dim, tp
        if placed[name] is Placement.EXPERT:
            dim, parts = 0, ep
        if dim is None:
            yield name, shape.numel()
        else:
            yield name, shape.numel() // shape[dim] * -(-shape[dim] // parts)
