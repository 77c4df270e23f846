"""Data parallelism in buckets against one process: five steps of AdamW with clipping and two micro-batches, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strata.comm.launch import World
from strata.parallel.layout import Layout
from tests.parallel.models import config_of, random_model
from tests.parallel.ranks import run_ranks
from tests.parallel.steps import CLIP, steps_of_ranks

LAYOUTS = {
    2: [
        ("llama", Layout(dp=2)),
        ("llama-biases-tied", Layout(shard=2, zero=1)),
        ("qwen3-biases-tied", Layout(shard=2, zero=2)),
    ],
    4: [
        ("qwen3-biases-tied", Layout(dp=4)),
        ("llama-biases-tied", Layout(shard=4, zero=1)),
        ("mistral", Layout(shard=4, zero=2)),
        ("qwen2", Layout(dp=2, shard=2, zero=1)),
        ("llama", Layout(dp=2, shard=2, zero=2)),
        ("llama-biases-tied", Layout(dp=2, tp=2)),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=1)),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=1, sequence_parallel=True)),
        ("llama-biases-tied", Layout(shard=2, tp=2, zero=2, sequence_parallel=True)),
    ],
}


def all_layouts(world: World, folder: Path) -> list[Any]:
    return [steps_of_ranks(world, config_of(name), layout) for name, layout in LAYOUTS[world.size]]


@pytest.mark.parametrize("world", LAYOUTS)
def test_five_steps_equal_one_process(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(all_layouts, world, tmp_path, timeout=180)
    for (name, layout), *found in zip(LAYOUTS[world], *ranks, strict=True):
        assert max(one["worst"][1] for one in found) < 1e-9, (name, layout, found)
        assert found[0]["smallest norm"] > 2 * CLIP
        if layout.zero and layout.tp == 1:
            whole = sum(parameter.numel() for parameter in random_model(config_of(name)).parameters())
            assert sum(one["elements"] for one in found) == whole * layout.dp
