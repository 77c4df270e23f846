"""Steps over layouts against one process in float64, on the CPU."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from strata.comm.launch import World
from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.save import save
from strata.parallel.layout import Layout
from strata.train.adapters.lora import LoraConfig
from strata.train.data.pack import PackedBatch, Samples
from strata.train.optimizer.config import OptimizerConfig
from strata.train.steps.make import fresh, make_step, stored
from tests.largest import largest
from tests.parallel.models import config_of
from tests.parallel.ranks import run_ranks
from tests.train.plain_losses import OBJECTIVES
from tests.train.samples import ALONE
from tests.train.step_ranks import errors_of, four_ranks, made, pack_of, repeated_messages, two_ranks

LORA: dict[str, Any] = {"projections": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
LAST_LAYER = {"projections": ["up_proj"], "changes": {"mlp_only_layers": [1]}}
DPO, POLICY = {"loss": "dpo"}, {"loss": "policy"}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    2: [
        ("llama", {"shard": 2, "zero": 2}, {}),
        ("qwen3-biases-tied", {"dp": 2}, {"recompute": "operations"}),
        ("llama-biases-tied", {"shard": 2, "zero": 1}, {"recompute": "layers"}),
        ("llama", {"shard": 2, "zero": 3}, {"recompute": "layers"}),
        ("mixtral", {"shard": 2, "zero": 3}, {"recompute": "mlp"}),
        ("qwen3-biases-tied", {"tp": 2, "sequence_parallel": True}, {"recompute": "layers"}),
        ("llama", {"cp": 2, "zero": 1}, {}),
        ("llama-biases-tied", {"tp": 2, "sequence_parallel": True}, {"recompute": "mlp"}),
        ("llama", {"cp": 2, "context": "ulysses"}, {"recompute": "layers"}),
        ("qwen3-biases-tied", {"cp": 2, "zero": 1}, {"recompute": "mlp"}),
        ("qwen3-biases-tied", {"pp": 2, "micro_batches": 2}, {"recompute": "layers"}),
        ("llama", {"pp": 2, "micro_batches": 2}, {"recompute": "mlp"}),
        ("llama", {"pp": 2, "micro_batches": 2, "schedule": "zero-bubble"}, {}),
        ("qwen3-moe", {"shard": 2, "ep": 2, "zero": 2}, {"recompute": "layers"}),
        ("mixtral", {"shard": 2, "ep": 2, "zero": 2}, {"recompute": "mlp"}),
        ("mixtral", {"shard": 2, "zero": 1}, {}),
        ("qwen3-next", {"shard": 2, "zero": 1}, {}),
        ("glm4-moe", {"tp": 2}, {}),
        ("deepseek-v2", {"shard": 2, "ep": 2, "zero": 3}, {"recompute": "layers"}),
        ("deepseek-v2", {"pp": 2, "micro_batches": 2}, {}),
        ("llama", {"dp": 2}, LORA | {"recompute": "layers"}),
        ("llama", {"shard": 2, "zero": 3}, LORA),
        ("qwen3-biases-tied", {"shard": 2, "zero": 2}, LORA | DPO),
        ("qwen3-biases-tied", {"tp": 2}, LORA),
        ("llama-biases-tied", {"tp": 2, "sequence_parallel": True}, LORA | DPO | {"recompute": "mlp"}),
        ("llama", {"cp": 2, "zero": 1}, LORA | DPO),
        ("qwen3-biases-tied", {"pp": 2, "micro_batches": 2}, LORA | DPO),
        ("llama", {"pp": 2, "micro_batches": 2, "schedule": "zero-bubble"}, LORA),
        ("llama", {"tp": 2, "sequence_parallel": True, "overlap": True}, LORA | {"even": True}),
        ("mixtral", {"shard": 2, "ep": 2, "zero": 3}, LORA | {"projections": ["k_proj"]}),
        # Dense layers alone have adapters, on one stage.
        ("qwen3-moe", {"pp": 2, "micro_batches": 2}, LORA | {"projections": ["up_proj"]}),
        ("qwen3-moe", {"pp": 2, "micro_batches": 2}, LAST_LAYER),
        ("qwen3-moe", {"pp": 2, "micro_batches": 2, "schedule": "zero-bubble"}, LAST_LAYER),
        ("glm4-moe", {"dp": 2}, LORA | {"projections": ["v_proj"]}),
        ("llama", {"dp": 2}, DPO),
        ("qwen3-biases-tied", {"shard": 2, "zero": 3}, DPO),
        ("llama", {"tp": 2}, DPO),
        ("llama", {"cp": 2, "context": "ulysses"}, DPO),
        ("qwen3-biases-tied", {"pp": 2, "micro_batches": 2}, DPO),
        ("qwen3-biases-tied", {"shard": 2, "zero": 1}, POLICY),
        ("llama", {"cp": 2}, POLICY),
        ("llama", {"pp": 2, "micro_batches": 2, "schedule": "zero-bubble"}, POLICY),
    ],
    4: [
        ("llama", {"dp": 2, "shard": 2, "zero": 2}, {"recompute": "mlp"}),
        ("llama", {"shard": 2, "tp": 2, "zero": 3, "sequence_parallel": True}, {"recompute": "layers"}),
        ("llama", {"cp": 2, "tp": 2}, {}),
        ("qwen3-biases-tied", {"pp": 2, "shard": 2, "zero": 1, "micro_batches": 2}, {}),
        ("llama", {"pp": 2, "cp": 2, "zero": 1, "micro_batches": 2}, {}),
        ("qwen3-moe", {"shard": 4, "ep": 2, "zero": 3}, {"recompute": "layers"}),
        ("qwen3-moe", {"shard": 4, "ep": 2, "zero": 3}, {"recompute": "mlp"}),
        ("llama", {"shard": 2, "tp": 2, "zero": 3, "sequence_parallel": True}, {"recompute": "mlp"}),
        ("qwen3-moe", {"pp": 2, "shard": 2, "zero": 3, "micro_batches": 2}, {"recompute": "mlp"}),
        ("llama", {"pp": 2, "tp": 2, "micro_batches": 2, "schedule": "interleaved"}, {"recompute": "mlp"}),
        ("llama", {"shard": 2, "tp": 2, "zero": 3, "sequence_parallel": True}, LORA | DPO),
        ("qwen3-biases-tied", {"pp": 2, "tp": 2, "micro_batches": 2, "schedule": "interleaved"}, LORA | POLICY),
        ("llama", {"pp": 2, "cp": 2, "zero": 1, "micro_batches": 2}, LORA | DPO),
        ("llama", {"cp": 2, "tp": 2}, POLICY),
    ],
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_steps_of_layouts_equal_one_process(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(two_ranks if world == 2 else four_ranks, world, tmp_path, timeout=180, layouts=LAYOUTS[world])
    for one, *found in zip(LAYOUTS[world], *(rank["worst"] for rank in ranks), strict=True):
        assert largest(error for _, error in found) < 1e-9, (one, found)
    if world == 2:
        for rank in ranks:
            assert rank["shapes"] == [[1, 2, 8], None, None, None]
            assert largest(rank["narrow"].values()) < 0.05, rank["narrow"]
            found = rank["skipped"]
            assert not found["finite"]
            assert found["counted"] == found["wanted"]
            for true in ("same", "again", "pieces"):
                assert found[true], true
            assert found["kinds"] == ["exp_avg", "exp_avg_sq", "master"]
            assert found["called"] == 3
        assert ranks[0]["skipped"]["loss"] == ranks[1]["skipped"]["loss"]


@pytest.mark.parametrize("recompute", ["none", "mlp"])
@pytest.mark.parametrize("family", ["llama", "qwen3-biases-tied", "mixtral", "deepseek-v2", "qwen3-next"])
def test_steps_of_one_device_equal_plain_pytorch(family: str, recompute: str) -> None:
    errors = errors_of(ALONE, family, Layout(), recompute=recompute)
    assert largest(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("options", [DPO, POLICY, LORA, LORA | DPO, LORA | POLICY])
@pytest.mark.parametrize("family", ["llama", "qwen3-biases-tied"])
def test_any_objective_equals_its_formula_on_one_device(family: str, options: dict[str, Any]) -> None:
    errors = errors_of(ALONE, family, Layout(), **options)
    assert largest(errors.values()) < 1e-9, errors


def parts_of(packed: PackedBatch, *ends: int) -> list[PackedBatch]:
    """The documents up to each of these numbers, in packs of their own."""
    found = []
    for first, end in pairwise((0, *ends)):
        start, stop = packed.offsets[first], packed.offsets[end]
        own = (packed.rows >= start) & (packed.rows < stop)
        assert packed.samples is not None
        numbers = packed.samples.numbers[first // 2 : end // 2]
        found.append(
            PackedBatch(
                packed.tokens[start:stop],
                packed.positions[start:stop],
                packed.offsets[first : end + 1] - start,
                packed.rows[own] - start,
                packed.targets[own],
                Samples(numbers, np.zeros_like(numbers), numbers, int(stop - start)),
            )
        )
    return found


@pytest.mark.parametrize("loss", OBJECTIVES)
@pytest.mark.parametrize("adapters", [{}, LORA])
def test_a_step_does_not_depend_on_how_documents_are_packed(loss: str, adapters: dict[str, Any]) -> None:
    config = config_of("llama")
    whole = pack_of(3, [5, 9, 2, 7, 4, 6, 11, 3], config.vocab_size, 0.7)
    lora = LoraConfig(3, 6.0, adapters["projections"]) if adapters else None
    found = []
    for packs in ([whole], parts_of(whole, 2, 8), parts_of(whole, 4, 6, 8)):
        step, _, _ = made(ALONE, config, Layout(), lora, objective=OBJECTIVES[loss])
        result = step(packs, 1e-2)
        measured = step.measured(packs)  # after the update
        found.append([result.loss, result.norm, *result.metrics.values(), *measured.values()])
    for other in found[1:]:
        assert torch.allclose(torch.stack(found[0]), torch.stack(other), rtol=1e-11, atol=0), (found[0], other)


# Of a layer, when it is computed again, and when its MLP alone is.
REPEATED: list[tuple[str, dict[str, Any], dict[str, int], dict[str, int]]] = [
    # Not the sum of the last product, whose result nothing in the backward pass reads.
    ("llama", {"tp": 2}, {"all_reduce": 1}, {}),
    ("llama", {"tp": 2, "sequence_parallel": True}, {"all_gather": 2, "reduce_scatter": 1}, {}),
    ("llama", {"tp": 2, "sequence_parallel": True, "overlap": True}, {"shift": 4}, {"shift": 2}),
]


def test_messages_that_are_sent_again(tmp_path: Path) -> None:
    layouts = [(family, layout) for family, layout, _, _ in REPEATED]
    for found in run_ranks(repeated_messages, 2, tmp_path, timeout=180, layouts=layouts):
        assert found == [[layers, mlp] for _, _, layers, mlp in REPEATED]


def test_first_values_are_those_of_initialize_and_of_a_folder(tmp_path: Path) -> None:
    for family in ("llama-biases-tied", "qwen3-moe"):
        config = config_of(family)
        model = build(config)
        initialize(model, 3)
        folder = tmp_path / family
        save(model, config, folder)
        for values in (fresh(3), stored(folder)):
            step = make_step(config, Layout(), Layout().mesh(ALONE), OptimizerConfig(learning_rate=1e-3), values)
            masters = {piece.name: piece.tensor for piece in step.state_shards() if piece.kind == "master"}
            for name, parameter in model.named_parameters():
                assert torch.equal(masters[name], parameter.detach().flatten()), (family, name)


ZERO_BUBBLE = Layout(pp=2, schedule="zero-bubble", micro_batches=2)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (Layout(dp=2), {"precision": "int4"}, "precision = 'int4' must be one of bf16, fp8-tensor, fp8-row"),
        (Layout(dp=2), {"recompute": "half"}, "recompute = 'half' must be one of none, operations, mlp, layers"),
        (Layout(tp=2), {"precision": "fp8-row"}, r"precision = 'fp8-row' is for layouts that divide documents only"),
        (
            Layout(shard=2, zero=3),
            {"recompute": "operations"},
            r"recompute = 'operations' is for layouts that divide documents only .* one of none, mlp, layers",
        ),
        (ZERO_BUBBLE, {"recompute": "mlp"}, r"recompute = 'mlp' does not go with schedule 'zero-bubble'"),
        (ZERO_BUBBLE, {"recompute": "layers"}, r"recompute = 'layers' does not go with schedule 'zero-bubble'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    layout: Layout, options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", lambda *_, **__: (object(), []))  # no other rank is here
    two = World(0, 0, 2, torch.device("cpu"), None)
    optimizer = OptimizerConfig(learning_rate=1e-3)
    with pytest.raises(ValueError, match=message):
        make_step(config_of("llama"), layout, layout.mesh(two), optimizer, fresh(0), **options)
