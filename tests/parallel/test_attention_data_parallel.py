"""Ranks with tokens of their own and a share of the experts each: what they hold, and that each has its own logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.graph.capture import capture
from strata.graph.cost import node_costs, operation_counts, step_costs
from strata.graph.gather import gather_after_attention
from strata.graph.ranks.shard import shard
from strata.hardware.roofline import Workload
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.parallel.serving_shard import RankShard, rank_config
from tests.engine.program.programs import step_program
from tests.graph.lockstep import run_in_lockstep
from tests.models.batches import HandPaged, random_sequences

from .models import random_model
from .shards import divisible_config, largest_error, model_of, shard_of
from .test_served_experts import CLOSE, MIXTURES, config_for, on_meta


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
    parts = [shard_of(model, config, size, index, expert_parallel=True, own_tokens=True) for index in range(size)]
    graphs = [step_program(own, "cpu", deterministic, shard=part) for part, own in parts]
    counts = operation_counts(graphs[0].logits)
    assert config.experts is not None
    layers = sum(config.experts.layers)
    # Once for all layers, and for the rows that are left behind the last attention, which rows are padding.
    assert (counts["dispatch_rows"], counts["combine_rows"], counts["held_experts"]) == (layers + 2, layers, layers)
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
    part, own = shard_of(model, config, 2, 1, expert_parallel=True, own_tokens=True)
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
        part = RankShard.of(config, 2, 0, expert_parallel=True, own_tokens=True)
        alone, own = capture(build(config)), capture(build(part.config))
    own = shard(own, part.placements, part.axes["tp"], 0, part.slots, own_tokens=True)  # type: ignore[arg-type]
    workload = Workload((1,) * 4, (1,) * 4)
    costs = {node.operation: node.cost for node in node_costs(own, on_meta(4, 1)[0], workload)}
    (whole,) = {node.cost for node in node_costs(alone, on_meta(4, 1)[0], workload) if node.operation == "experts"}
    row = config.hidden_size * 4
    assert (costs["dispatch_rows"].sent, costs["combine_rows"].sent) == (4 * row, 4 * row)
    assert costs["held_experts"].flops == pytest.approx(whole.flops, abs=1)
    # Costs of steps by tokens: the expected bytes of experts are those of eight tokens on a half of them.
    mixtures = step_costs(gather_after_attention(own), on_meta).mixtures
    ((wanted, *_), *_) = step_costs(gather_after_attention(alone), on_meta).mixtures
    assert [of_rows for _, of_rows, _ in mixtures] == [False, True]
    for read, _, _ in mixtures:
        assert read(4) == pytest.approx(wanted(8) / 2, abs=1)


def test_what_cannot_be_served_so() -> None:
    with pytest.raises(ValueError, match=r"enable_dp_attention=True needs a mixture .* data_parallel_size instead"):
        rank_config(divisible_config("llama"), 2, 0, expert_parallel=True, own_tokens=True)
    with pytest.raises(ValueError, match=r"enable_dp_attention=True .* needs enable_expert_parallel=True"):
        rank_config(config_for("mixtral"), 2, 0, own_tokens=True)
    few = config_for("mixtral", num_local_experts=3)
    with pytest.raises(ValueError, match=r"=4 is more than the 3 experts, of which .*; this model takes 1, 2, 3"):
        rank_config(few, 4, 0, expert_parallel=True, own_tokens=True)
