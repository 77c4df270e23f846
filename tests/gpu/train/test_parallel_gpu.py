"""Layouts over NCCL against one GPU, in float64: five steps of AdamW with clipping and two micro-batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from strata.comm.launch import join_world
from strata.parallel.layout import Layout
from tests.gpu.ranks import found_by_ranks
from tests.parallel.models import config_of
from tests.parallel.steps import steps_of_ranks

pytestmark = pytest.mark.gpu

LAYOUTS = {
    2: [
        ("llama-biases-tied", Layout(dp=2)),
        ("qwen3-biases-tied", Layout(shard=2, zero=1)),
        ("llama", Layout(shard=2, zero=2)),
        ("llama", Layout(shard=2, zero=3)),
        ("qwen3-biases-tied", Layout(tp=2)),
        ("llama-biases-tied", Layout(tp=2, sequence_parallel=True)),
        ("llama", Layout(cp=2, zero=1)),
        ("mixtral", Layout(shard=2, ep=2, zero=2)),
    ],
    4: [
        ("llama", Layout(dp=2, shard=2, zero=2)),
        ("qwen2", Layout(dp=2, shard=2, zero=3)),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=2, sequence_parallel=True)),
        ("llama", Layout(shard=2, tp=2, zero=3, sequence_parallel=True)),
        ("qwen3-biases-tied", Layout(cp=2, tp=2, context="ulysses", sequence_parallel=True)),
        ("qwen3-moe", Layout(shard=4, ep=2, zero=3)),
    ],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_five_steps_equal_one_gpu(ranks: int, tmp_path: Path) -> None:
    for found in found_by_ranks(__name__, ranks, tmp_path, timeout=300):
        for (name, layout), one in zip(LAYOUTS[ranks], found, strict=True):
            assert one["worst"][1] < 1e-9, (name, layout, one)


def main() -> None:
    """One rank."""
    with join_world("cuda", timeout_seconds=120) as world:
        found = [steps_of_ranks(world, config_of(name), layout) for name, layout in LAYOUTS[world.size]]
        (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
