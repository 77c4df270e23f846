"""Models of which eight ranks divide heads and widths, but neither the vocabulary nor the KV heads; their shards, and
the logits of these in some steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from strata.comm.mesh import Axis
from strata.engine.program.program import StepProgram
from strata.engine.ranks.vocabulary_shard import VocabularyShard
from strata.models.config import ModelConfig
from strata.models.experts import stored_views
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.shard import inside, zeroed_places
from strata.parallel.serving_shard import RankShard
from tests.engine.program.programs import step_program
from tests.graph.lockstep import run_in_lockstep
from tests.largest import largest
from tests.models.batches import random_sequences

from .models import BIASED_CONFIGS, CONFIGS, config_of, random_model

FAMILIES = (*CONFIGS, *BIASED_CONFIGS)
# Whose norms stand before the branches, so that they take up the additions and messages behind the branches, one each.
PRE_NORM = tuple(name for name in FAMILIES if not name.startswith(("olmo", "gemma", "glm4", "deepseek", "gpt")))
RANKS = (2, 4, 8)
MIXTURES = ("mixtral", "qwen3-moe")


def divisible_config(name: str, **changes: Any) -> ModelConfig:
    """Of `CONFIGS`, with widths that eight ranks divide."""
    sizes: dict[str, Any] = {"intermediate_size": 40}
    if name == "qwen3-moe":
        sizes["moe_intermediate_size"] = 16
    if name.startswith("deepseek"):
        changes["num_key_value_heads"] = None  # every head has keys and values of its own
    return config_of(name, **(sizes | changes))


def config_for(name: str, **changes: Any) -> ModelConfig:
    """Of six experts, which four ranks divide unevenly; as wide as no ranks divide them."""
    counts = {"num_local_experts": 6} if name == "mixtral" else {"num_experts": 6, "moe_intermediate_size": 11}
    return divisible_config(name, **(counts | changes))


def shard_of(
    model: CausalLM, config: ModelConfig, size: int, index: int, axis: Axis | None = None, **options: int
) -> Any:
    """One rank's share of a whole model, and its own model with the slices copied. options: of `RankShard.of`."""
    shard = RankShard.of(config, size, index, axis, **options)
    own = build(shard.config).to(next(model.parameters()).dtype).requires_grad_(False)
    parameters = dict(own.named_parameters())
    with torch.no_grad():
        for name, value in model.named_parameters():
            sources = dict(stored_views(model, name, value))
            for stored, target in stored_views(own, name, parameters[name]):
                source = sources[stored]
                for box, place in zeroed_places(target, shard.boxes(name, tuple(source.shape))):
                    place.copy_(source[inside(box)])
    return shard, own


def joined(found: Sequence[Sequence[Tensor]], vocabulary: int) -> list[Tensor]:
    """The logits of each step, from the parts of all ranks: each has those of its own ids."""
    return [torch.cat(parts, -1)[:, :vocabulary] for parts in zip(*found, strict=True)]


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    return random_model(config, dtype).requires_grad_(False)


def programs_of(
    model: CausalLM,
    config: ModelConfig,
    size: int,
    deterministic: bool = False,
    *,
    overlap: int | None = None,
    **options: Any,
) -> tuple[list[RankShard], list[StepProgram]]:
    """The shards of all ranks and the graphs of their steps. overlap: `overlap_tokens`; options: of `RankShard.of`."""
    parts = [shard_of(model, config, size, index, **options) for index in range(size)]
    more = {} if overlap is None else {"overlap_tokens": overlap}
    return [part for part, _ in parts], [
        step_program(own, "cpu", deterministic, shard=part, **more) for part, own in parts
    ]


Run = Callable[[Sequence[tuple[Any, ...]]], list[Tensor]]  # each rank's arguments -> each rank's result
# What of each sequence is new in a step, and the rows whose logits are wanted.
Steps = Iterable[tuple[dict[int, Sequence[int]], list[int]]]


def together(graphs: Sequence[fx.GraphModule]) -> Run:
    """All ranks in lockstep, or one alone."""
    if len(graphs) == 1:
        return lambda arguments: [graphs[0](*arguments[0])]
    return lambda arguments: run_in_lockstep(graphs, arguments)


def prompts_and_decodes(vocabulary: int) -> Steps:
    """Two prompts, one of them in two chunks, then decodes."""
    first, second, third = random_sequences(vocabulary, (9, 6, 4))
    return [
        ({0: first, 1: second[:2]}, [3, 8]),
        ({1: second[2:], 2: third, 0: [5]}, [3, 8]),
        ({0: [7], 2: [60], 1: [0]}, [0, 1, 2]),
        ({1: [31]}, [0]),
    ]


def follow(caches: Sequence[Any], steps: Steps, run: Run, decodes: Run | None = None) -> list[list[Tensor]]:
    """Each rank's logits of the steps over its pages. decodes: runs those of decodes by graphs that all rows leave."""
    found: list[list[Tensor]] = [[] for _ in caches]
    for chunks, rows in steps:
        batches = [cache.next_batch(chunks) for cache in caches]
        if decodes is not None and all(len(new) == 1 for new in chunks.values()):
            results = decodes([(batch,) for batch in batches])
        else:
            results = run([(batch, torch.tensor(rows, dtype=torch.int32)) for batch in batches])
        for own, result in zip(found, results, strict=True):
            own.append(result)
    return found


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def largest_error(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    return largest(relative(*pair) for pair in zip(found, wanted, strict=True))


def error_of_part(part: RankShard, found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """Of the logits of a rank's own ids; steps that sample no row count as none."""
    zeroed_places = VocabularyShard.of(part)
    pairs = (
        (zeroed_places.local(one), two[:, zeroed_places.first : zeroed_places.first + zeroed_places.count])
        for one, two in zip(found, wanted, strict=True)
    )
    return largest(relative(*pair) for pair in pairs if len(pair[0]))
