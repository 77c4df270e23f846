"""Serving a mixture over ranks, with tokens of all or of their own: what each loads and holds; they make the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, fx

from strata.cost.nodes import node_costs
from strata.cost.step_costs import step_costs
from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.gather import gather_after_attention
from strata.graph.ranks.shard import shard
from strata.graph.trace import trace, trace_head
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.experts import stored_parameters
from strata.models.families import build
from strata.models.save import save
from strata.models.weights import load
from strata.parallel.expert_balance.placement import PERIOD
from strata.parallel.expert_balance.placement import turns as expert_turns
from strata.parallel.serving_shard import RankShard
from tests.engine.program.programs import step_program
from tests.graph.lockstep import run_in_lockstep
from tests.models.batches import HandPaged, random_sequences

from .models import random_model
from .shards import (
    MIXTURES,
    config_for,
    follow,
    joined,
    largest_error,
    model_of,
    prompts_and_decodes,
    shard_of,
    together,
)

CLOSE = 1e-5


def logits_of(graphs: Sequence[fx.GraphModule], configs: Sequence[ModelConfig]) -> list[list[Tensor]]:
    caches = [HandPaged(config, 3, 16) for config in configs]
    return follow(caches, prompts_and_decodes(61), together(graphs))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_rank_loads_its_own_experts_whole(name: str, size: int, load_format: str, tmp_path: Path) -> None:
    config = config_for(name)
    save(random_model(config, torch.float32), config, tmp_path)
    whole = stored_parameters(load(tmp_path, load_format=load_format, seed=3)[0])
    if load_format == "auto":
        assert whole.keys() == load_file(tmp_path / "model.safetensors").keys()
    holders = dict.fromkeys((key for key in whole if ".experts." in key), 0)
    for index in range(size):
        part = RankShard.of(config, size, index, expert_parallel=True)
        model, _ = load(tmp_path, load_format=load_format, seed=3, part=part)
        own = stored_parameters(model)
        numbers = {int(key.split(".experts.")[1].split(".")[0]) for key in own if ".experts." in key}
        assert len(numbers) in (6 // size, -(-6 // size))
        for key, value in own.items():
            if ".experts." in key:
                holders[key] += 1
                assert torch.equal(value, whole[key]), key
            elif ".mlp.gate.weight" in key or "block_sparse_moe.gate" in key:
                assert torch.equal(value, whole[key]), key
    assert set(holders.values()) == {1}


@pytest.mark.parametrize(("size", "redundant"), [(2, 2), (4, 2), (2, 6)])
def test_copies_take_turns_and_the_logits_stay(size: int, redundant: int) -> None:
    """Of six experts, the first have copies; tables that change between calls are read anew."""
    config = config_for("mixtral")
    model = model_of(config)
    graph = bind(gather_after_attention(compose(trace(model), trace_head(model))), "cpu")
    (wanted,) = logits_of([graph], [config])
    parts = [shard_of(model, config, size, index, expert_parallel=True, redundant=redundant) for index in range(size)]
    placement = np.arange(6 + redundant) % 6
    assert sum((part.config.experts.local for part, _ in parts), ()) == tuple(placement.tolist())
    turns = torch.zeros(2, 6, PERIOD, dtype=torch.int32)
    graphs = []
    for part, own in parts:
        halves = [
            shard(one, part.placements, part.axes["tp"], part.index, part.slots, turns)
            for one in (trace(own), trace_head(own))
        ]
        graphs.append(bind(gather_after_attention(compose(*halves)), "cpu", axes=part.axes))
    configs = [part.config for part, _ in parts]
    for table in (expert_turns(placement, 6), np.flip(expert_turns(placement, 6), 1).copy()):
        turns.copy_(torch.from_numpy(table))
        found = logits_of(graphs, configs)
        assert largest_error(joined(found, 61), wanted) < CLOSE


def on_meta(tokens: int, rows: int) -> tuple[Batch, Tensor]:
    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    return Batch(integers(tokens), integers(tokens), integers(tokens + 1), 1), integers(rows)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_costs_its_share_of_the_experts(size: int) -> None:
    """Of eight experts; ranks together compute and read what one does."""
    config = config_for("qwen3-moe", num_experts=8)
    with torch.device("meta"):
        graph = trace(build(config))
        parts = [RankShard.of(config, size, index, expert_parallel=True) for index in range(size)]
        graphs = [
            shard(trace(build(part.config)), part.placements, part.axes["tp"], part.index, part.slots) for part in parts
        ]
    workload = Workload((1,) * 5, (1,) * 5)
    (alone,) = (node.cost for node in node_costs(graph, on_meta(5, 1)[0], workload) if node.operation == "experts")
    shares = [
        node.cost
        for own in graphs
        for node in node_costs(own, on_meta(5, 1)[0], workload)
        if node.operation == "local_experts"
    ]
    assert len(shares) == size
    assert sum(share.flops for share in shares) == pytest.approx(alone.flops, abs=size)
    assert sum(share.weights for share in shares) == pytest.approx(alone.weights, abs=size)
    whole = step_costs(gather_after_attention(graph), on_meta)
    of_ranks = [step_costs(gather_after_attention(own), on_meta) for own in graphs]
    for tokens in (1, 5, 100):
        ((read, _, _),), mine = whole.mixtures, [costs.mixtures for costs in of_ranks]
        assert sum(own(tokens) for ((own, _, _),) in mine) == pytest.approx(read(tokens), abs=size)


def test_a_bound_graph_runs_a_part_in_place_of_the_whole() -> None:
    config = config_for("mixtral")
    part, own = shard_of(random_model(config, torch.float32), config, 2, 1, expert_parallel=True)
    graph = shard(trace(own), part.placements, part.axes["tp"], 1, part.slots)
    nodes = [node for node in graph.graph.nodes if node.name.startswith("experts")]
    assert [tuple(node.args[5:]) for node in nodes] == [(3, 6)] * 2
    assert operation_counts(bind(graph, "cpu", axes=part.axes))["local_experts"] == 2


def own_steps(config: ModelConfig, index: int) -> list[tuple[Batch, Tensor]]:
    """Three steps of a rank's own sequences: a prompt and a part of one, the rest and a decode, decodes. All ranks run
    as many tokens, of which two are sampled, in chunks of their own lengths."""
    first, second = random_sequences(config.vocab_size, (9 - index, 7 + index), seed=index)
    cache = HandPaged(config, 3, 16)
    batches = []
    for chunks in ({0: first, 1: second[: 3 + index]}, {1: second[3 + index :], 0: [5]}, {0: [7 + index], 1: [0]}):
        count = sum(map(len, chunks.values()))
        batches.append((cache.next_batch(chunks), torch.arange(count, dtype=torch.int32)[-2:]))
    return batches


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_each_rank_has_the_logits_of_its_own_tokens(name: str, size: int, deterministic: bool) -> None:
    config = config_for(name)
    model = model_of(config)
    alone = step_program(model, "cpu", deterministic).logits
    parts = [shard_of(model, config, size, index, expert_parallel=True, attention_dp=True) for index in range(size)]
    graphs = [step_program(own, "cpu", deterministic, shard=part) for part, own in parts]
    counts = operation_counts(graphs[0].logits)
    assert config.experts is not None
    layers = sum(config.experts.layers)
    # Once for all layers, and for the rows that are left behind the last attention, which rows are padding.
    assert (counts["dispatch_rows"], counts["combine_rows"], counts["local_experts"]) == (layers + 2, layers, layers)
    assert counts["all_reduce"] == counts["all_gather"] == 0
    assert graphs[0].part is None
    # Pools keep what the steps before wrote, so each run has its own.
    wanted = [[alone(*given) for given in own_steps(config, index)] for index in range(size)]
    steps = zip(*(own_steps(part.config, part.index) for part, _ in parts), strict=True)
    found = [run_in_lockstep([one.logits for one in graphs], given) for given in steps]
    for index in range(size):
        assert largest_error([step[index] for step in found], wanted[index]) < CLOSE


def test_a_rank_holds_all_but_experts_whole() -> None:
    config = config_for("qwen3-moe")
    model = random_model(config, torch.float32)
    part, own = shard_of(model, config, 2, 1, expert_parallel=True, attention_dp=True)
    whole = dict(model.named_parameters())
    for name, value in own.named_parameters():
        expected = whole[name][3:] if ".experts." in name else whole[name]
        assert torch.equal(value, expected), name
    assert part.config.num_heads == config.num_heads
    assert part.config.vocab_size == config.vocab_size


def test_what_a_rank_computes_and_sends() -> None:
    """Of a step of four tokens and a row on each of two ranks: experts see eight, and half of their choices."""
    config = config_for("qwen3-moe", num_experts=8, mlp_only_layers=[])
    with torch.device("meta"):
        part = RankShard.of(config, 2, 0, expert_parallel=True, attention_dp=True)
        alone, own = trace(build(config)), trace(build(part.config))
    own = shard(own, part.placements, part.axes["tp"], 0, part.slots, attention_dp=True)  # type: ignore[arg-type]
    workload = Workload((1,) * 4, (1,) * 4)
    costs = {node.operation: node.cost for node in node_costs(own, on_meta(4, 1)[0], workload)}
    (whole,) = {node.cost for node in node_costs(alone, on_meta(4, 1)[0], workload) if node.operation == "experts"}
    row = config.hidden_size * 4
    assert (costs["dispatch_rows"].sent, costs["combine_rows"].sent) == (4 * row, 4 * row)
    assert costs["local_experts"].flops == pytest.approx(whole.flops, abs=1)
    # Costs of steps by tokens: the expected bytes of experts are those of eight tokens on a half of them.
    mixtures = step_costs(gather_after_attention(own), on_meta).mixtures
    ((wanted, *_), *_) = step_costs(gather_after_attention(alone), on_meta).mixtures
    assert [of_rows for _, of_rows, _ in mixtures] == [False, True]
    for read, _, _ in mixtures:
        assert read(4) == pytest.approx(wanted(8) / 2, abs=1)
