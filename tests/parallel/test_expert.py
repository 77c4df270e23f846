"""Expert parallelism against one process in float64: results, every gradient, idle experts and ranks without tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strata.comm.collectives import start_all_reduce
from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.models.balance import routers
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.expert_config import ExpertsConfig
from strata.models.experts import Experts
from strata.models.layers import CausalLM
from strata.parallel.expert import DispatchedExperts, shard_experts
from strata.train.config import RECOMPUTE_OF_MODULES
from strata.train.recompute import recompute_modules
from tests.largest import largest, name_of_largest
from tests.parallel.models import config_of, gradients_of, loss_of, random_batch, random_model
from tests.parallel.ranks import relative_error, run_ranks

FAMILIES = ("mixtral", "qwen3-moe")
# Of one rank each; the last one of four has a single token.
LENGTHS = [[9, 4], [1, 13], [6], [1]]
# Experts that no token goes to: the last one, and all that the last rank holds.
IDLE = {"none": 0, "one": 1, "a whole rank": 2}


def model_with_idle_experts(config: ModelConfig, idle: int) -> CausalLM:
    model = random_model(config)
    for router in routers(model).values():
        router.selection_bias = torch.zeros(config.num_experts)
        router.selection_bias[config.num_experts - idle :] = -10
    return model


def batches(config: ModelConfig, ranks: int) -> list[tuple[Batch, torch.Tensor]]:
    return [random_batch(config, lengths, seed) for seed, lengths in enumerate(LENGTHS[:ranks])]


def equal_to_one_process(world: World, folder: Path) -> dict[str, Any]:
    """Of every model the largest relative error, by what it is the error of."""
    mesh = Mesh.of(world, {"shard": world.size, "ep": world.size})
    axis, found = mesh.axis("ep"), {}
    for name in FAMILIES:
        config = config_of(name)
        for kind, idle in IDLE.items():
            whole, model = model_with_idle_experts(config, idle), model_with_idle_experts(config, idle)
            losses = [loss_of(whole, *each) for each in batches(config, world.size)]
            torch.stack(losses).sum().backward()
            shard_experts(model, axis)
            loss = loss_of(model, *batches(config, world.size)[axis.index])
            loss.backward()
            errors = {"loss": relative_error(loss, losses[axis.index])}
            gradients = gradients_of(model)
            shared = [gradient for parameter, gradient in gradients.items() if ".experts." not in parameter]
            sums = start_all_reduce(torch.cat([gradient.flatten() for gradient in shared]), axis).wait()
            for gradient, total in zip(shared, sums.split([gradient.numel() for gradient in shared]), strict=True):
                gradient.copy_(total.view_as(gradient))
            for parameter, gradient in gradients.items():
                wanted = whole.get_parameter(parameter).grad
                assert wanted is not None
                if ".experts." in parameter:
                    wanted = wanted.chunk(axis.size)[axis.index]
                errors[parameter] = (gradient - wanted).abs().max().item() / max(1e-3, wanted.abs().max().item())
            worst = name_of_largest(errors)
            last = gradients_of(model)["model.layers.1.mlp.experts.down_proj"][-1]
            found[f"{name}, idle: {kind}"] = [worst, errors[worst], bool(last.any())]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_results_and_gradients_equal_one_process(world: int, tmp_path: Path) -> None:
    ranks = run_ranks(equal_to_one_process, world, tmp_path)
    for rank in ranks:
        assert len(rank) == 6
        assert all(error < 1e-9 for _, error, _ in rank.values()), rank
    for key, (_, _, busy) in ranks[-1].items():
        assert busy == key.endswith("none")


COUNT, PER_TOKEN, HIDDEN = 8, 3, 5
TOKENS = [7, 0, 13, 1]  # of each rank
# What is added to the scores of the experts: all alike, all tokens want the same, nobody wants the last half.
TASTES = {"any": [0] * 8, "the same": [9, 0, 0, 9, 0, 0, 0, 9], "the first half": [9] * 4 + [0] * 4}


@contextmanager
def messages() -> Iterator[list[Tensor]]:
    """What this rank sends meanwhile by all-to-all exchanges."""
    sent: list[Tensor] = []
    send = dist.all_to_all_single

    def noted(out: Tensor, given: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(given)
        return send(out, given, *args, **options)

    dist.all_to_all_single = noted
    try:
        yield sent
    finally:
        dist.all_to_all_single = send


def routed_tokens(taste: str, tokens: int, seed: int) -> list[Tensor]:
    """Rows, the weights and numbers of their experts, and the gradient of what these make of them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, COUNT, generator=generator, dtype=torch.float64) + torch.tensor(TASTES[taste])
    weights, chosen = scores.topk(PER_TOKEN)
    x, slope = torch.randn(2, tokens, HIDDEN, generator=generator, dtype=torch.float64)
    return [x.requires_grad_(), weights.detach().requires_grad_(), chosen, slope]


def sent_once(world: World, folder: Path) -> dict[str, Any]:
    """Of every taste the largest error of result and gradients, and rows sent there and back with how many are due."""
    axis = Mesh.of(world, {"shard": world.size, "ep": world.size}).axis("ep")
    whole = Experts(HIDDEN, ExpertsConfig(COUNT, PER_TOKEN, 4, True, (True,), 0.0)).double()
    generator, found = torch.Generator().manual_seed(0), {}
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    for taste in TASTES:
        whole.zero_grad()
        wanted = [routed_tokens(taste, TOKENS[rank], rank) for rank in range(world.size)]
        results = [whole(*given) for *given, _ in wanted]
        torch.autograd.backward(results, [slope for *_, slope in wanted])
        part, (*given, slope) = DispatchedExperts(whole, axis), routed_tokens(taste, TOKENS[axis.index], axis.index)
        with messages() as sent:
            result = part(*given)
        result.backward(slope)
        pairs = [(result, results[axis.index])]
        pairs += [(own.grad, one.grad) for own, one in zip(given[:2], wanted[axis.index], strict=False)]
        for name, parameter in part.named_parameters():
            pairs.append((parameter.grad, whole.get_parameter(name).grad.chunk(axis.size)[axis.index]))
        error = largest((own - one).abs().max().item() for own, one in pairs if own.numel())
        there, back = (len(one) for one in sent if one.shape[-1] == HIDDEN)
        ranks_of = [[set(row) for row in (one[2] // (COUNT // axis.size)).tolist()] for one in wanted]
        due = sum(len(ranks) for ranks in ranks_of[axis.index])
        due_back = sum(axis.index in ranks for one in ranks_of for ranks in one)
        found[taste] = [error, [there, back], [due, due_back]]
    return found


def test_a_token_travels_at_most_once_to_a_rank(tmp_path: Path) -> None:
    for rank in run_ranks(sent_once, 4, tmp_path):
        assert len(rank) == len(TASTES)
        for error, rows, due in rank.values():
            assert error < 1e-9
            assert rows == due


def messages_of_passes(world: World, folder: Path) -> dict[str, list[int]]:
    """By what is computed again: how many messages the forward and the backward pass of a model send."""
    axis, config, found = Mesh.of(world, {"shard": world.size, "ep": world.size}).axis("ep"), config_of("mixtral"), {}
    gradients = {}
    for recompute in RECOMPUTE_OF_MODULES:
        model = random_model(config)
        shard_experts(model, axis)
        recompute_modules(model, recompute)
        with messages() as ahead:
            loss = loss_of(model, *batches(config, world.size)[axis.index])
        with messages() as back:
            loss.backward()
        found[recompute] = [len(ahead), len(back)]
        gradients[recompute] = gradients_of(model)
        assert all(torch.equal(one, gradients["none"][name]) for name, one in gradients[recompute].items())
    return found


def test_a_layer_that_is_computed_again_sends_nothing_home_again(tmp_path: Path) -> None:
    # Of each layer: how many rows there are, numbers and weights of experts, the rows, and what they became; backward
    # the last three. Computed again, the first four.
    for rank in run_ranks(messages_of_passes, 2, tmp_path):
        assert rank == {"none": [2 * 5, 2 * 3], "mlp": [2 * 5, 2 * 7], "layers": [2 * 5, 2 * 7]}


def test_one_rank_is_left_as_it_is() -> None:
    config = config_of("mixtral")
    model = random_model(config)
    before = list(model.modules())
    shard_experts(model, Mesh.of(World(0, 0, 1, torch.device("cpu"), None), {}).axis("ep"))
    assert list(model.modules()) == before
