"""Products of context, expert, tensor and data parallelism against one process: five steps of AdamW, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata.comm.launch import World
from strata.parallel.layout import Layout
from tests.largest import largest
from tests.parallel.models import config_of
from tests.parallel.ranks import run_ranks
from tests.parallel.steps import CLIP, steps_of_ranks

LAYOUTS = [
    ("llama", Layout(shard=2, cp=2, zero=2)),
    ("qwen3-biases-tied", Layout(cp=2, tp=2, context="ulysses", sequence_parallel=True)),
    ("mistral", Layout(shard=2, cp=2, zero=3)),
    ("qwen3-moe", Layout(shard=4, ep=2, zero=2)),
    ("mixtral", Layout(shard=2, cp=2, ep=4, zero=1)),
    ("qwen3-moe", Layout(shard=2, ep=2, tp=2, zero=2, sequence_parallel=True)),
    ("mixtral", Layout(cp=2, ep=2, tp=2)),
    ("qwen3-moe", Layout(shard=4, ep=2, zero=3)),
    ("mixtral", Layout(dp=2, shard=2, ep=2, zero=3)),
]


def all_layouts(world: World, folder: Path) -> list[Any]:
    return [steps_of_ranks(world, config_of(name), layout) for name, layout in LAYOUTS]


def test_five_steps_equal_one_process(tmp_path: Path) -> None:
    ranks = run_ranks(all_layouts, 4, tmp_path, timeout=300)
    for (name, layout), *found in zip(LAYOUTS, *ranks, strict=True):
        assert largest(one["worst"][1] for one in found) < 1e-9, (name, layout, found)
        assert found[0]["smallest norm"] > 2 * CLIP
