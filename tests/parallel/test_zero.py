"""Layouts against one process: five steps of AdamW with clipping and micro-batches, float64; and what zero sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strata.comm import collectives
from strata.comm.launch import World
from strata.kernels.attention.attention import attention
from strata.kernels.loss.loss import linear_cross_entropy
from strata.kernels.op import Implementation
from strata.models.batch import Batch
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.parallel import buckets
from strata.parallel.layout import Layout
from strata.parallel.parallelize import Parallel, parallelize
from strata.parallel.zero import ZeroGradients
from strata.train.compile import TrainingGraph
from tests.largest import largest
from tests.parallel.models import (
    config_of,
    fill_masters,
    gradients_of,
    head_weight,
    loss_of,
    random_batch,
    random_model,
)
from tests.parallel.ranks import relative_error, run_each, run_ranks
from tests.parallel.steps import CLIP, steps_of_ranks

# Of FSDP where zero is 3.
LAYOUTS = {
    2: [
        ("llama", Layout(dp=2)),
        ("llama-biases-tied", Layout(shard=2, zero=1)),
        ("qwen3-biases-tied", Layout(shard=2, zero=2)),
        ("qwen3-next", Layout(shard=2, zero=2)),
        ("llama", Layout(shard=2, zero=3)),
        ("qwen3-biases-tied", Layout(shard=2, zero=3)),
        ("qwen3-next", Layout(shard=2, ep=2, zero=3)),
    ],
    4: [
        ("qwen3-biases-tied", Layout(dp=4)),
        ("llama-biases-tied", Layout(shard=4, zero=1)),
        ("mistral", Layout(shard=4, zero=2)),
        ("llama-biases-tied", Layout(shard=4, zero=3)),
        ("qwen2", Layout(dp=2, shard=2, zero=1)),
        ("llama", Layout(dp=2, shard=2, zero=2)),
        ("qwen2", Layout(dp=2, shard=2, zero=3)),
        ("llama-biases-tied", Layout(dp=2, tp=2)),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=1)),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=1, sequence_parallel=True)),
        ("llama-biases-tied", Layout(shard=2, tp=2, zero=2, sequence_parallel=True)),
        ("llama", Layout(shard=2, tp=2, zero=3)),
        ("qwen3-biases-tied", Layout(shard=2, tp=2, zero=3, sequence_parallel=True)),
        ("llama", Layout(shard=2, cp=2, zero=2)),
        ("qwen3-biases-tied", Layout(cp=2, tp=2, context="ulysses", sequence_parallel=True)),
        ("mistral", Layout(shard=2, cp=2, zero=3)),
        ("qwen3-moe", Layout(shard=4, ep=2, zero=2)),
        ("mixtral", Layout(shard=2, cp=2, ep=4, zero=1)),
        ("qwen3-moe", Layout(shard=2, ep=2, tp=2, zero=2, sequence_parallel=True)),
        ("mixtral", Layout(cp=2, ep=2, tp=2)),
        ("qwen3-moe", Layout(shard=4, ep=2, zero=3)),
        ("mixtral", Layout(dp=2, shard=2, ep=2, zero=3)),
    ],
}


def layouts(world: World, folder: Path) -> list[Any]:
    return [steps_of_ranks(world, config_of(name), layout) for name, layout in LAYOUTS[world.size]]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_each([layouts, details, narrow_and_filled], 2, tmp_path_factory.mktemp("two"))


def check_five_steps(ranks: list[Any]) -> None:
    """Against one process."""
    for (name, layout), *found in zip(LAYOUTS[len(ranks)], *ranks, strict=True):
        assert largest(one["worst"][1] for one in found) < 1e-9, (name, layout, found)
        assert found[0]["smallest norm"] > 2 * CLIP
        if layout.zero in (1, 2) and layout.tp == layout.cp == layout.ep == 1:
            whole = sum(parameter.numel() for parameter in random_model(config_of(name)).parameters())
            assert sum(one["elements"] for one in found) == whole * layout.dp


def test_five_steps_of_two_ranks(of_two: dict[str, list[Any]]) -> None:
    check_five_steps(of_two["layouts"])


def test_five_steps_of_four_ranks(tmp_path: Path) -> None:
    check_five_steps(run_ranks(layouts, 4, tmp_path, timeout=300))


CONFIG = config_of("llama")


def divided(world: World, model: CausalLM, zero: int, **options: Any) -> tuple[Parallel, ZeroGradients]:
    """A model over all ranks, a bucket a layer."""
    layout = Layout(shard=world.size, zero=zero)  # type: ignore[arg-type]
    parallel = parallelize(model, CONFIG, layout, layout.mesh(world), bucket_elements=1, **options)
    assert isinstance(parallel.gradients, ZeroGradients)
    return parallel, parallel.gradients


def reduced_gradient_errors(gradients: ZeroGradients, wanted: dict[str, torch.Tensor]) -> float:
    """Largest relative error of the parts' gradients."""
    errors = []
    for part in gradients.shards:
        held = wanted[part.name].flatten()[part.start : part.start + part.master.numel()]
        assert part.master.grad is not None
        errors.append(relative_error(part.master.grad, held) if held.any() else float(part.master.grad.abs().max()))
    return largest(errors)


def gradients_of_both(world: World) -> tuple[tuple[Batch, torch.Tensor], dict[str, torch.Tensor]]:
    """A batch of this rank, and the gradient of the batches of both."""
    own, other = (random_batch(CONFIG, [7, 5], seed=rank) for rank in (world.rank, 1 - world.rank))
    model = random_model(CONFIG)
    (loss_of(model, *own) + loss_of(model, *other)).backward()
    return own, gradients_of(model)


def count_messages() -> list[int]:
    """From now on, the elements of every message that sums gradients."""
    sent: list[int] = []

    def counting(x: torch.Tensor, *rest: Any) -> collectives.Pending:
        sent.append(x.numel())
        return collectives.start_reduce_scatter(x, *rest)

    buckets.start_reduce_scatter = counting
    return sent


def sent_while_computing(world: World) -> dict[str, Any]:
    """Messages until the first and until the last of two backward passes ended."""
    own, wanted = gradients_of_both(world)
    twice = {name: 2 * gradient for name, gradient in wanted.items()}
    found: dict[str, Any] = {}
    for zero in (1, 2):
        sent = count_messages()
        model = random_model(CONFIG)
        _, gradients = divided(world, model, zero)
        loss_of(model, *own).backward()
        first = len(sent)
        gradients.accumulate()
        if zero == 2:
            found["until the next gradient"] = [len(gradients._under_way)]
            gradients._open_bucket(["lm_head.weight"])
            found["until the next gradient"].append(len(gradients._under_way))
        gradients.set_is_last_backward()
        loss_of(model, *own).backward()
        found[f"messages of zero {zero}"] = [first, len(sent)]
        gradients.accumulate()
        gradients.reduce()
        found[f"zero {zero}"] = reduced_gradient_errors(gradients, twice)
    return found


def without_some_gradients(world: World) -> dict[str, Any]:
    """One rank does not use the head: it sends zeros, and nobody waits for ever."""
    batches = [random_batch(CONFIG, [7, 5], seed=rank) for rank in range(2)]
    model, reference = random_model(CONFIG), random_model(CONFIG)
    (reference(batches[0][0]).square().sum() + loss_of(reference, *batches[1])).backward()
    _, gradients = divided(world, model, 2)
    loss = model(batches[0][0]).square().sum() if world.rank == 0 else loss_of(model, *batches[1])
    loss.backward()
    gradients.accumulate()
    gradients.reduce()
    return {"unused head": reduced_gradient_errors(gradients, gradients_of(reference))}


def merged_graph(world: World) -> dict[str, Any]:
    """Merged matrices are views of the flat memory; products write gradients there, and weights are waited for."""
    own, wanted = gradients_of_both(world)
    sent = count_messages()
    model, source = random_model(CONFIG), random_model(CONFIG)
    _, gradients = divided(world, model, 2)
    graph = TrainingGraph(model, gradients=gradients)
    for whole, parameters in graph.merged:
        gradients.watch(whole, parameters)
    copied = copied_gradients(gradients)
    logits = graph(own[0]) @ head_weight(model).t()
    torch.nn.functional.cross_entropy(logits, own[1], ignore_index=-100, reduction="sum").backward()
    messages = len(sent)
    gradients.accumulate()
    gradients.reduce()
    error = reduced_gradient_errors(gradients, wanted)
    matrices = [name for name in copied if "_proj" in name]
    with torch.no_grad():
        for master in (part.master for part in gradients.shards):
            master.mul_(2)
        for parameter in source.parameters():
            parameter.mul_(2)
    gradients.start_all_gather_weights()
    hidden = relative_error(graph(own[0]), source(own[0]))
    under_way = [bucket._gathering is not None for bucket in gradients._buckets]
    gradients.wait()
    head = torch.equal(model.lm_head.weight, source.lm_head.weight)
    return {
        "messages": messages,
        "merged graph": error,
        "copied": [len(copied), matrices],
        "waited": hidden,
        "under way": under_way,
        "head": head,
    }


def copied_gradients(gradients: ZeroGradients) -> list[str]:
    """Grows by the names of parameters whose gradient autograd has made and a bucket copies."""
    copied: list[str] = []
    for bucket in gradients._buckets:
        accumulate = bucket.accumulate
        bucket.accumulate = lambda names, gradient, accumulate=accumulate: (
            copied.extend(names),
            accumulate(names, gradient),
        )[1]  # type: ignore[method-assign, misc]
    return copied


def rounded_masters(world: World) -> dict[str, Any]:
    """A bfloat16 model is the rounding of float32 masters, which keep what is too small for it."""
    own, _ = gradients_of_both(world)
    model = random_model(CONFIG, torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _, gradients = divided(world, model, 1, compute_dtype=torch.bfloat16)
    with torch.no_grad():
        for part in gradients.shards:
            part.master.mul_(1 + 1e-4)
    gradients.sync_weights()
    rounded = {name: (weight * (1 + 1e-4)).bfloat16() for name, weight in before.items()}
    equal = all(torch.equal(parameter, rounded[name]) for name, parameter in model.named_parameters())
    loss_of(model, *own).backward()
    gradients.accumulate()
    gradients.reduce()
    return {"rounded": equal, "wide": all(part.master.grad.dtype == torch.float32 for part in gradients.shards)}


def filled_from_nothing(world: World) -> dict[str, Any]:
    """A model that begins on the meta device."""
    source = random_model(CONFIG)
    with torch.device("meta"):
        model = build(CONFIG).double()
    parallel, gradients = divided(world, model, 2)
    layout = Layout(shard=world.size, zero=2)
    fill_masters(parallel, layout, layout.mesh(world), source.named_parameters())
    gradients.sync_weights()
    batch, _ = random_batch(CONFIG, [7, 5])
    # Parameters are views of a bucket: equal values at other addresses, on which the bits of a product may depend.
    equal = all(torch.equal(parameter, source.get_parameter(name)) for name, parameter in model.named_parameters())
    return {"filled": equal and relative_error(model(batch), source(batch)) < 1e-12}


def details(world: World, folder: Path) -> dict[str, Any]:
    checks = (sent_while_computing, without_some_gradients, merged_graph, rounded_masters, filled_from_nothing)
    return {name: value for check in checks for name, value in check(world).items()}


def test_messages_merging_rounding_and_filling(of_two: dict[str, list[Any]]) -> None:
    for found in of_two["details"]:
        # Embedding, two layers, norm and head, each sent before the backward pass that announced it has ended.
        assert found["messages of zero 1"] == [0, 5]
        assert found["messages of zero 2"] == [5, 10]
        # The last message of a pass, whose memory is free when the next pass begins to fill its own.
        assert found["until the next gradient"] == [1, 0]
        assert found["messages"] == 5
        # Embedding, head and the norms of two layers and of the end.
        assert found["copied"] == [2 + 2 * 2 + 1, []]
        # The graph has no head, whose weights come last.
        assert found["under way"] == [True, False, False, False, False]
        for small in ("zero 1", "zero 2", "unused head", "merged graph", "waited"):
            assert found[small] < 1e-12, small
        for true in ("head", "rounded", "wide", "filled"):
            assert found[true], true


@pytest.fixture
def alone() -> World:
    return World(0, 0, 1, torch.device("cpu"), None)


def of_one_rank(world: World, model: CausalLM) -> ZeroGradients:
    gradients = parallelize(model, CONFIG, Layout(), Layout().mesh(world)).gradients
    assert isinstance(gradients, ZeroGradients)
    return gradients


def test_a_parameter_that_was_moved_away_is_told(alone: World) -> None:
    model = random_model(CONFIG)
    gradients = of_one_rank(alone, model)
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"parameter model\.norm\.weight was moved away from the memory"):
        gradients.sync_weights()


@pytest.mark.parametrize("recompute", ["none", "mlp"])
def test_a_graph_waits_for_weights_no_sooner_than_it_needs_them(
    monkeypatch: pytest.MonkeyPatch, alone: World, recompute: str
) -> None:
    """The last norm's travel last, with the head's: the first layers do not wait for them."""
    model = random_model(CONFIG)
    _, gradients = divided(alone, model, 1)
    happened: list[str] = []
    monkeypatch.setattr(gradients, "wait", lambda names: happened.extend(names))
    graph = TrainingGraph(model, recompute=recompute, gradients=gradients)
    of_layer = attention.bind("cpu", differentiable=True).candidates[0].run

    def attend(*given: Any) -> torch.Tensor:
        happened.append("attention")
        found: torch.Tensor = of_layer(*given)
        return found

    monkeypatch.setattr(attention, "_bound", {})
    monkeypatch.setattr(attention, "implementations", [Implementation("told", attend, "cpu", differentiable=True)])
    graph(random_batch(CONFIG, [7, 5])[0])
    assert happened[0] == "model.embed_tokens.weight"
    layers = [place for place, name in enumerate(happened) if name == "attention"]
    assert happened.index("model.norm.weight") > layers[-1]
    for layer, place in enumerate(layers):
        assert happened.index(f"model.layers.{layer}.input_layernorm.weight") in range(
            layers[layer - 1] if layer else 0, place
        )


def test_a_gradient_that_comes_too_late_is_told(alone: World) -> None:
    model = random_model(CONFIG)
    gradients = of_one_rank(alone, model)
    gradients.set_is_last_backward()
    loss_of(model, *random_batch(CONFIG, [5])).backward()
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    with pytest.raises(RuntimeError, match=r"a second gradient of model\.norm\.weight came after the first was sent"):
        gradients.accumulate()


def test_only_neighbours_can_be_watched_together(alone: World) -> None:
    model = random_model(CONFIG)
    gradients = of_one_rank(alone, model)
    attention = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"q_proj\.weight and .*v_proj\.weight do not lie side by side"):
        gradients.watch(torch.zeros(3, requires_grad=True), [attention.q_proj.weight, attention.v_proj.weight])


def test_values_of_another_model_are_refused(alone: World) -> None:
    model = random_model(CONFIG)
    mesh = Layout().mesh(alone)
    parallel = parallelize(model, CONFIG, Layout(), mesh)
    values = dict(random_model(CONFIG).named_parameters())
    missing = [(name, value) for name, value in values.items() if "lm_head" not in name]
    with pytest.raises(ValueError, match=r"parameter lm_head\.weight is missing"):
        fill_masters(parallel, Layout(), mesh, missing)
    values["lm_head.weight"] = values["lm_head.weight"][:, :5]
    with pytest.raises(ValueError, match=r"parameter lm_head\.weight has the shape \[61, 5\]"):
        fill_masters(parallel, Layout(), mesh, values.items())


TIED = config_of("qwen3-biases-tied")


def narrow_and_filled(world: World, folder: Path) -> dict[str, Any]:
    """Mixed precision, and a model that begins on the meta device."""
    batch, targets = random_batch(TIED, [7, 5])
    layout = Layout(shard=world.size, zero=3)
    source = random_model(TIED, torch.float32)
    with torch.device("meta"):
        model = build(TIED)
    mesh = layout.mesh(world)
    parallel = parallelize(model, TIED, layout, mesh, compute_dtype=torch.bfloat16)
    fill_masters(parallel, layout, mesh, source.named_parameters())
    parallel.gradients.sync_weights()
    narrow = random_model(TIED, torch.float32).to(torch.bfloat16)
    entered: list[torch.dtype] = []
    model.model.layers[1].register_forward_pre_hook(lambda _, inputs: entered.extend(x.dtype for x in inputs[2:]))
    hidden, wanted = model(batch), narrow(batch)
    losses = [linear_cross_entropy(h, head_weight(m), targets).sum() for h, m in ((hidden, model), (wanted, narrow))]
    (losses[0] / world.size).backward()  # all ranks see the same tokens, each with its share of the loss
    losses[1].backward()
    parallel.gradients.accumulate()
    parallel.gradients.reduce()
    layer = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    return {
        "angles": sorted(map(str, entered)),
        # Gathered weights lie at other addresses, on which the bits of a product may depend.
        "hidden": relative_error(hidden.float(), wanted.float()),
        "loss": relative_error(*losses),
        "divided": layer.to_local().numel() < layer.numel(),
        "dtypes": sorted({str(part.master.grad.dtype) for part in parallel.gradients.shards}),
        "norm": abs(float(parallel.gradients.norm() / global_norm_of(narrow)) - 1),
    }


def global_norm_of(model: torch.nn.Module) -> torch.Tensor:
    gradients = [parameter.grad.float().flatten() for parameter in model.parameters()]
    return torch.cat(gradients).norm()


def test_bfloat16_computes_as_one_process_does_and_keeps_float32_masters(of_two: dict[str, list[Any]]) -> None:
    for found in of_two["narrow_and_filled"]:
        assert found["angles"] == ["torch.float32"] * 2
        assert found["hidden"] < 2e-2
        assert found["loss"] < 2e-2
        assert found["divided"]
        assert found["dtypes"] == ["torch.float32"]
        assert found["norm"] < 1e-2
