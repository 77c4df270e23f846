"""Steps that keep experts equally busy against plain PyTorch: every layout, skipped steps, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm.launch import World
from strata.parallel.layout import Layout
from tests.largest import largest
from tests.parallel.ranks import run_ranks
from tests.train.balance_ranks import balanced, errors_of, worst
from tests.train.step_ranks import packs_of, rate_of

ALONE = World(0, 0, 1, torch.device("cpu"), None)

LAYOUTS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", "loss", {"dp": 2}, {}),
    ("qwen3-moe", "bias", {"dp": 2}, {}),
    ("qwen3-moe", "loss", {"shard": 2, "zero": 2}, {"recompute": "operations"}),
    ("mixtral", "loss", {"shard": 2, "zero": 3}, {"recompute": "layers"}),
    ("mixtral", "loss", {"tp": 2, "sequence_parallel": True}, {"recompute": "mlp"}),
    ("qwen3-moe", "bias", {"shard": 2, "ep": 2, "zero": 3}, {"recompute": "mlp"}),
    ("qwen3-moe", "loss", {"shard": 2, "ep": 2, "zero": 1}, {}),
    ("qwen3-moe", "bias", {"shard": 2, "ep": 2, "zero": 3}, {"recompute": "layers"}),
    ("mixtral", "loss", {"tp": 2}, {}),
    # 13 to 15 tokens: the second rank has a row of padding.
    ("qwen3-moe", "loss", {"tp": 2, "sequence_parallel": True}, {}),
    ("mixtral", "bias", {"tp": 2, "sequence_parallel": True}, {}),
    ("qwen3-moe", "loss", {"cp": 2}, {}),
    ("mixtral", "bias", {"cp": 2, "zero": 1}, {}),
    ("mixtral", "loss", {"pp": 2, "micro_batches": 2}, {"recompute": "layers"}),
    ("qwen3-moe", "bias", {"pp": 2, "micro_batches": 2}, {}),
    ("glm4-moe", "bias", {"shard": 2, "zero": 2}, {}),
    ("deepseek-v3", "bias", {"shard": 2, "ep": 2, "zero": 3}, {"recompute": "layers"}),
    ("deepseek-v3", "bias", {"pp": 2, "micro_batches": 2}, {}),
]


def test_layouts_equal_one_process(tmp_path: Path) -> None:
    ranks = run_ranks(worst, 2, tmp_path, layouts=LAYOUTS)
    for one, *found in zip(LAYOUTS, *ranks, strict=True):
        assert largest(error for _, error in found) < 1e-9, (one, found)


@pytest.mark.parametrize(
    ("family", "method", "recompute"),
    [
        *(
            (family, method, recompute)
            for family, method in (("mixtral", "loss"), ("qwen3-moe", "loss"), ("qwen3-moe", "bias"))
            for recompute in ("none", "operations", "mlp", "layers")
        ),
        ("deepseek-v3", "bias", "none"),
        ("deepseek-v3", "bias", "mlp"),
    ],
)
def test_the_graph_of_one_device_equals_plain_pytorch(family: str, method: str, recompute: str) -> None:
    errors = errors_of(ALONE, family, method, Layout(), recompute=recompute)
    assert largest(errors.values()) < 1e-9, errors


def test_balancing_acts_from_the_second_step_on() -> None:
    """And not at all by "none", which still says how busy experts are."""
    steps = {method: balanced(ALONE, "mixtral", method, Layout())[:2] for method in ("none", "loss", "bias")}
    for index in range(3):
        found = {method: step(packs_of(config, index, 0), rate_of(index)) for method, (step, config) in steps.items()}
        for method in ("loss", "bias"):
            assert found[method].norm.equal(found["none"].norm) == (index == 0), (method, index)
    assert found["none"].metrics.keys() == {"counted", "balance_loss", "busiest_expert"}


@pytest.mark.parametrize("method", ["loss", "bias"])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_is(method: str) -> None:
    step, config, _, _ = balanced(ALONE, "mixtral", method, Layout())
    step(packs_of(config, 0, 0), rate_of(0))
    before = {
        piece.kind: piece.tensor.clone() for piece in step.state_shards() if piece.name == "model.layers.0.mlp.gate"
    }
    assert len(before) == 1
    weight = step._passes._model.model.norm.weight  # type: ignore[attr-defined]
    handle = weight.register_hook(lambda gradient: gradient * float("inf"))
    assert not step(packs_of(config, 1, 0), rate_of(1)).norm.isfinite()
    handle.remove()

    def is_same() -> bool:
        now = {piece.kind: piece.tensor for piece in step.state_shards() if piece.name == "model.layers.0.mlp.gate"}
        return all(torch.equal(now[kind], tensor) for kind, tensor in before.items())

    assert is_same()
    step(packs_of(config, 2, 0), rate_of(2))
    assert not is_same()
