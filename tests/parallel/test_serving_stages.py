"""Steps of a served model by the stages of a pipeline against those of one stage, every family, in lockstep and over
gloo: bit for bit, because a stage computes what the whole model does at its layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.comm.operations import Along
from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.ranks.shard import shard as shard_graph
from strata.graph.ranks.stages import exchange, stage
from strata.graph.trace import trace, trace_head
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.save import save
from strata.models.weights import load
from strata.parallel.serving_shard import RankShard
from tests.models.batches import HandPaged
from tests.parallel.models import random_model
from tests.parallel.ranks import run_ranks
from tests.parallel.shards import FAMILIES, divisible_config, model_of, prompts_and_decodes, shard_of, together


def config_of(name: str) -> ModelConfig:
    return divisible_config(name, num_hidden_layers=3)


def whole_graph(model: CausalLM, part: RankShard) -> fx.GraphModule:
    along = Along("tp", part.size)
    return compose(*(shard_graph(one, part.placements, along, part.index) for one in (trace(model), trace_head(model))))


def stage_graph(part: RankShard, own: CausalLM) -> fx.GraphModule:
    """Of a rank's stage, captured from a model without memory, with the parameters that the stage has."""
    with torch.device("meta"):
        model = build(part.divided)
    along = Along("tp", part.size)
    graph = shard_graph(stage(trace(model), *part.layers, own), part.placements, along, part.index)
    if part.stage + 1 < part.stages:
        return graph
    head = fx.GraphModule(own, trace_head(model).graph)
    return compose(graph, shard_graph(head, part.placements, along, part.index))


def chunks_of(vocabulary: int) -> list[dict[int, Sequence[int]]]:
    return [chunks for chunks, _ in prompts_and_decodes(vocabulary)]


def caches_of(parts: Sequence[RankShard]) -> list[HandPaged]:
    return [HandPaged(part.config, 3, 16) for part in parts]


@pytest.mark.parametrize(("size", "stages"), [(1, 2), (2, 3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_have_the_logits_of_the_whole_model(name: str, size: int, stages: int) -> None:
    config = config_of(name)
    model = model_of(config)
    shards, models = zip(*(shard_of(model, config, size, index) for index in range(size)), strict=True)
    graphs = [whole_graph(own, part) for part, own in zip(shards, models, strict=True)]
    caches = caches_of(shards)
    wanted = [together(graphs)([(cache.next_batch(one),) for cache in caches]) for one in chunks_of(config.vocab_size)]

    places = [
        [RankShard.of(config, size, index, stages=stages, stage=at) for index in range(size)] for at in range(stages)
    ]
    of_stages = [
        [stage_graph(part, own) for part, own in zip(parts, copies_of(models, parts), strict=True)] for parts in places
    ]
    pools = [caches_of(parts) for parts in places]
    for one, expected in zip(chunks_of(config.vocab_size), wanted, strict=True):
        handed: list[tuple[Tensor, ...]] = [() for _ in range(size)]
        for graphs, caches in zip(of_stages, pools, strict=True):
            arguments = [(cache.next_batch(one), *given) for cache, given in zip(caches, handed, strict=True)]
            handed = [(found,) for found in together(graphs)(arguments)]
        assert all(torch.equal(found, logits) for (found,), logits in zip(handed, expected, strict=True))


def copies_of(models: Sequence[CausalLM], parts: Sequence[RankShard]) -> list[CausalLM]:
    """What the ranks of a stage hold of the ranks of the whole model."""
    found = []
    for model, part in zip(models, parts, strict=True):
        own = part.build().requires_grad_(False)
        values = dict(model.named_parameters())
        own.load_state_dict({name: values[name] for name, _ in own.named_parameters()}, strict=False)
        found.append(own)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_hold_the_model_together(name: str) -> None:
    config = config_of(name)
    parts = [RankShard.of(config, 2, 0, stages=3, stage=at) for at in range(3)]
    assert [part.layers for part in parts] == [(0, 1), (1, 2), (2, 3)]
    assert [part.config.num_layers for part in parts] == [1, 1, 1]
    assert tuple(window for part in parts for window in part.config.windows) == config.windows
    with torch.device("meta"):
        whole = {parameter for parameter, _ in build(config).named_parameters()}
        held = [{parameter for parameter, _ in part.build().named_parameters()} for part in parts]
    assert set.union(*held) == whole
    shared = [held[at] & held[other] for at, other in ((0, 1), (1, 2), (0, 2))]
    assert shared == [set(), set(), {"model.embed_tokens.weight"} if config.tied else set()]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("name", ["llama-biases-tied", "qwen3-moe"])
def test_a_stage_is_its_tensors_of_the_checkpoint(name: str, load_format: str, tmp_path: Path) -> None:
    config = config_of(name)
    save(random_model(config, torch.float32), config, tmp_path)
    whole, _ = load(tmp_path, load_format=load_format, seed=3, part=RankShard.of(config, 2, 1))
    values = dict(whole.named_parameters())
    for at in range(2):
        part = RankShard.of(config, 2, 1, stages=2, stage=at)
        own, given = load(tmp_path, load_format=load_format, seed=3, part=part)
        assert given is part.config
        assert own.model.rotary.table.device.type == "cpu"
        for parameter, value in own.named_parameters():
            assert torch.equal(value, values[parameter]), parameter


def test_the_stage_with_the_head_has_fewer_layers() -> None:
    """Of a vocabulary as large as two layers, the last of two stages has a layer less than the others."""
    config = divisible_config("llama", num_hidden_layers=6, vocab_size=2 * 4608 // 24)
    parts = [RankShard.of(config, 1, 0, stages=2, stage=at) for at in range(2)]
    assert [part.layers for part in parts] == [(0, 4), (4, 6)]


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_layers(stages: int) -> None:
    with pytest.raises(
        ValueError, match=f"pipeline_parallel_size={stages}: each stage needs a layer, and this model has 3"
    ):
        RankShard.of(config_of("llama"), 1, 0, stages=stages)


def over_gloo(world: World, folder: Path) -> bool:
    """Whether the last stage has the logits of the whole model; two steps are under way at once."""
    axis = Mesh.of(world, {"pp": world.size}).axis("pp")
    along = Along("pp", world.size)
    config = config_of("qwen3-biases-tied")
    model = model_of(config)
    part = RankShard.of(config, 1, 0, stages=world.size, stage=world.rank)
    (own,) = copies_of([model], [part])
    graph = exchange(stage_graph(part, own), along, part.stage, config.hidden_size, torch.float32)
    graph = bind(graph, "cpu", axes={"pp": axis})
    (cache,), (one,) = caches_of([part]), caches_of([RankShard.of(config, 1, 0)])
    whole = bind(whole_graph(model, RankShard.of(config, 1, 0)), "cpu")
    steps = chunks_of(config.vocab_size)
    found = [graph(cache.next_batch(step)) for step in steps]
    wanted = [whole(one.next_batch(step)) for step in steps]
    return part.stage + 1 < part.stages or all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_over_gloo(stages: int, tmp_path: Path) -> None:
    assert all(run_ranks(over_gloo, stages, tmp_path))
