"""What a runner is told before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from strata.cache.groups import PageGroup
from strata.models.config import ModelConfig


@dataclass(frozen=True)
class RunnerConfig:
    """max_sequences: slots; max_tokens: tokens of one step; max_length: tokens of one sequence; heads: of the model's
    queries; mask_ids: how many ids a mask of a grammar tells of. stages: of the pipeline that this is one of; if there
    are several, `Runner.learn` tells what has been drawn. windows: the different ones of the attention layers whose
    rows are in the runner's own pool; only_windows: see `WindowSteps`.
    """

    max_sequences: int
    max_tokens: int
    max_length: int
    windows: frozenset[int | None]
    heads: int
    mask_ids: int
    stages: int = 1
    only_windows: bool = False


def planned_windows(config: ModelConfig, group: PageGroup) -> frozenset[int | None]:
    """`RunnerConfig.windows` of the layers of a group; none where ranks divide their keys, because what attends to them
    follows no plan."""
    return frozenset() if group.shape.kept.ranks > 1 else frozenset(config.windows[layer] for layer in group.layers)
