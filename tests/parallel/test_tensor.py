"""Tensor parallelism, with and without sequence parallelism, against one process in float64: loss, gradients, bytes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.kernels.loss import loss
from strata.parallel.families import sharding_table
from strata.parallel.loss import vocabulary_cross_entropy
from strata.parallel.tensor import TensorSharding, shard_model
from tests.largest import largest, name_of_largest
from tests.parallel.models import CONFIGS, config_of, gradients_of, head_weight, loss_of, random_batch, random_model
from tests.parallel.ranks import relative_error, run_ranks

LENGTHS = [9, 1, 13]  # 23 tokens: no number of ranks divides them
EVEN_LENGTHS = [9, 2, 13]
# With which options of `shard_model`, and the sequences.
MODES: dict[str, tuple[dict[str, bool], list[int]]] = {
    "tensor": ({}, LENGTHS),
    "sequence": ({"sequence_parallel": True}, LENGTHS),
    "overlap": ({"sequence_parallel": True, "overlap": True}, EVEN_LENGTHS),
}


class LogitsSeen(TorchDispatchMode):
    """Whether any tensor had a whole row of logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.seen = vocab_size, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1:
            self.seen |= result.shape[-1] == self.vocab_size
        return result


def divided_elements(model: torch.nn.Module, sharding: TensorSharding) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if not sharding.is_replicated(name))


def equal_to_one_process(world: World, folder: Path) -> dict[str, Any]:
    """Of every family in every mode: the largest relative errors, and what stays small."""
    loss.CHUNK_ELEMENTS = 100  # several chunks of logits
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    found: dict[str, Any] = {}
    for name, mode in product(CONFIGS, MODES):
        options, lengths = MODES[mode]
        config = config_of(name)
        batch, targets = random_batch(config, lengths)
        whole, model = random_model(config), random_model(config)
        wanted_hidden, wanted_loss = whole(batch), loss_of(whole, batch, targets)
        wanted_loss.backward()
        sharding = shard_model(model, axis, sharding_table(config.architecture), **options)
        hidden = model(batch)
        with LogitsSeen(config.vocab_size) as logits:
            losses = vocabulary_cross_entropy(hidden, head_weight(model), targets, axis, config.vocab_size)
            losses.sum().backward()
        gradients = gradients_of(model)
        sharding.all_reduce_partial(gradients)
        errors = {
            "hidden": relative_error(hidden, wanted_hidden),
            "loss": relative_error(losses.sum(), wanted_loss),
        }
        for parameter, gradient in gradients.items():
            errors[parameter] = relative_error(gradient, sharding.shard(parameter, whole.get_parameter(parameter).grad))
        worst = name_of_largest(errors)
        found[f"{name} {mode}"] = {
            "worst": [worst, errors[worst]],
            "logits": logits.seen,
            "elements": [divided_elements(each, sharding) for each in (model, whole)],
            "names": [parameter for parameter, _ in model.named_parameters()]
            == [parameter for parameter, _ in whole.named_parameters()],
        }
    with pytest.raises(ValueError, match="a batch of 23 tokens cannot overlap its messages"):
        model(random_batch(config, LENGTHS)[0])
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_loss_and_every_gradient_equal_one_process(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(equal_to_one_process, world, tmp_path)
    for key in ranks[0]:
        found = [rank[key] for rank in ranks]
        assert largest(one["worst"][1] for one in found) < 1e-9, (key, found)
        assert not any(one["logits"] for one in found)
        assert all(one["names"] for one in found)
        assert sum(one["elements"][0] for one in found) == found[0]["elements"][1]


def compiled_layers(world: World, folder: Path) -> dict[str, Any]:
    """Largest difference between the gradients of an eager layer and of one traced as one whole graph."""
    axis = Mesh.of(world, {"tp": world.size}).axis("tp")
    config = config_of("qwen3-biases-tied", num_hidden_layers=1)
    batch, targets = random_batch(config, LENGTHS)
    models = random_model(config), random_model(config)
    models[1].model.layers[0].compile(backend="aot_eager", fullgraph=True)
    for model in models:
        shard_model(model, axis, sharding_table(config.architecture), sequence_parallel=True)
        losses = vocabulary_cross_entropy(model(batch), head_weight(model), targets, axis, config.vocab_size)
        losses.sum().backward()
    eager, traced = map(gradients_of, models)
    return {name: relative_error(traced[name], eager[name]) for name in eager}


def test_layers_compile_whole(tmp_path: Path) -> None:
    for rank in run_ranks(compiled_layers, 2, tmp_path):
        assert max(rank.values()) < 1e-12


def test_one_rank_is_left_as_it_is() -> None:
    config = config_of("qwen3-biases-tied")
    axis = Mesh.of(World(0, 0, 1, torch.device("cpu"), None), {}).axis("tp")
    batch, targets = random_batch(config, LENGTHS)
    whole, model = random_model(config), random_model(config)
    sharding = shard_model(model, axis, sharding_table(config.architecture), sequence_parallel=True)
    wanted = loss_of(whole, batch, targets)
    losses = vocabulary_cross_entropy(model(batch), head_weight(model), targets, axis, config.vocab_size)
    wanted.backward()
    losses.sum().backward()
    sharding.all_reduce_partial(gradients_of(model))
    assert torch.equal(losses.sum(), wanted)
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, whole.get_parameter(name).grad), name
