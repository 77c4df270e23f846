"""Rows go to the ranks of their experts alone: ranks side by side in one process have the logits of one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx

from strata.engine.program.program import StepProgram
from strata.engine.program.source import MovingExperts
from strata.graph.trace import operation_of
from strata.graph.walk import operation_counts
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.layers import CausalLM
from strata.parallel.serving_shard import RankShard
from tests.engine.program.programs import graph_of, launched, replayed, step_program
from tests.graph.lockstep import run_in_lockstep
from tests.models.batches import HandPaged, random_sequences

from .shards import MIXTURES, config_for, largest_error, model_of, shard_of
from .test_served_experts import CLOSE


@pytest.fixture(autouse=True)
def _exchanges_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankShard, "exchange_tokens", lambda self, dtype: 3)


def own_steps(config: ModelConfig, index: int, lengths: tuple[int, int]) -> list[tuple[Batch, Tensor]]:
    """A rank's own prompts and their decodes, padded to 14 and 4 tokens, of which two are sampled."""
    first, second = random_sequences(config.vocab_size, (max(1, lengths[0]), max(1, lengths[1])), seed=index)
    cache = HandPaged(config, 3, 16)
    chunks = {0: first[: lengths[0]], 1: second[: lengths[1]]}
    steps = []
    for new, rows in (({at: one for at, one in chunks.items() if one}, 14), ({0: [3], 1: [4]}, 4)):
        count = sum(map(len, new.values()))
        batch = cache.next_batch({**new, 2: [0] * (rows - count)})
        assert batch.pages is not None
        batch.pages.slot_mapping[count:] = -1
        steps.append((batch, torch.tensor([0, 1], dtype=torch.int32)))
    return steps


def moving(config: ModelConfig, slots: int, counts: bool) -> MovingExperts:
    """Experts that are in two slots take turns; the others are where their numbers say."""
    assert config.experts is not None
    count, layers = config.experts.count, len(config.experts.layers)
    turns = torch.arange(count, dtype=torch.int32)[None, :, None].repeat(layers, 1, 2)
    for more in range(slots - count):
        turns[:, more, 1] = count + more
    return MovingExperts(turns, torch.zeros(layers, count, dtype=torch.int64), counts)


def graphs_of(
    model: CausalLM,
    config: ModelConfig,
    size: int,
    redundant: int | None = None,
    *,
    counts: Sequence[bool] = (),
    deterministic: bool = False,
) -> list[StepProgram]:
    graphs = []
    for index in range(size):
        part, own = shard_of(model, config, size, index, expert_parallel=True, attention_dp=True, redundant=redundant)  # type: ignore[arg-type]
        experts = None if redundant is None else moving(config, part.slots.total, counts[index])
        graphs.append(step_program(own, "cpu", deterministic, shard=part, target={"experts": experts}))
    return graphs


def mixture_of_eight(name: str) -> tuple[CausalLM, ModelConfig]:
    changes = {"num_local_experts": 8} if name == "mixtral" else {"num_experts": 8, "mlp_only_layers": []}
    config = config_for(name, **changes)
    return model_of(config), config


def exchanged_of(graphs: Sequence[StepProgram]) -> list[fx.GraphModule]:
    found = [graph_of(one, "exchanged_logits") for one in graphs]
    assert None not in found
    return found  # type: ignore[return-value]


def totals_of(graph: fx.GraphModule) -> Tensor:
    return graph.get_buffer("expert_totals").clone()


@pytest.mark.parametrize(("size", "redundant"), [(2, None), (3, None), (8, None), (2, 4), (4, 8)])
@pytest.mark.parametrize("name", MIXTURES)
def test_each_rank_has_the_logits_of_its_own_tokens(name: str, size: int, redundant: int | None) -> None:
    model, config = mixture_of_eight(name)
    assert config.experts is not None
    alone = step_program(model, "cpu", False).logits
    counted = redundant is not None
    graphs = graphs_of(model, config, size, redundant, counts=[True] * size)
    layers, counts = sum(config.experts.layers), operation_counts(exchanged_of(graphs)[0])
    # Behind the last attention rows go to all, with what is padding; to be counted choices go to all, too.
    expected = {"send_rows": layers - 1, "return_rows": layers - 1, "local_experts": 1, "combine_rows": 1}
    expected["dispatch_rows"] = 2 + layers * counted
    assert {name: counts[name] for name in expected} == expected

    # The second rank has padding alone in the first step.
    lengths = [(9 - index % 3, 5 - index % 2) if index != 1 else (0, 0) for index in range(size)]
    wanted = [[alone(*given) for given in own_steps(config, index, lengths[index])] for index in range(size)]
    for exchanged in (True, False):
        run = exchanged_of(graphs) if exchanged else [one.logits for one in graphs]
        steps = zip(*(own_steps(config, index, lengths[index]) for index in range(size)), strict=True)
        for step, given in enumerate(steps):
            found = run_in_lockstep(run, given)
            of_tokens = [index for index in range(size) if lengths[index][0] or step]
            for index in of_tokens:
                assert largest_error([found[index]], [wanted[index][step]]) < CLOSE
        if counted:
            # All ranks' choices by each of them, and those of the same steps twice.
            totals = [totals_of(graph) for graph in run]
            assert all(torch.equal(one, totals[0]) for one in totals)
            tokens = sum(map(sum, lengths)) + 2 * size
            assert int(totals[0][0].sum()) == tokens * config.experts.per_token * (1 if exchanged else 2)


def test_ranks_send_the_same_messages_whether_they_count_or_not() -> None:
    model, config = mixture_of_eight("qwen3-moe")
    graphs = graphs_of(model, config, 2, 2, counts=[True, False])
    messages = [
        [operation.name for node in graph.graph.nodes if (operation := operation_of(node)) and operation.collective]
        for graph in exchanged_of(graphs)
    ]
    assert messages[0] == messages[1]
    assert "dispatch_rows" in messages[1]


def test_steps_of_few_tokens_recorded_ones_and_those_of_deterministic_mode_go_to_all() -> None:
    model, config = mixture_of_eight("qwen3-moe")
    graphs = graphs_of(model, config, 2)[0]
    assert launched(graphs, 2) is graphs.logits
    assert launched(graphs, 3) is graph_of(graphs, "exchanged_logits")
    assert replayed(graphs, 100_000) is graphs.logits
    assert graphs_of(model, config, 2, deterministic=True)[0].variant("exchanged_logits") is None
