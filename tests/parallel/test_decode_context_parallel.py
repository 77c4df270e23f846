"""Steps of ranks that divide keys and values by sequence against those of one rank that keeps all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strata.comm.launch import World
from strata.comm.mesh import Mesh
from strata.comm.operations import Along
from strata.cost.nodes import node_costs, total
from strata.engine.program.variants import KeyGathers
from strata.engine.ranks.expert_balance import expert_tables
from strata.graph.ranks.shard_keys import KeySharding, shard_keys
from strata.graph.trace import trace
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.state.dcp_shard import ALL_KEYS, ELSEWHERE, DcpShard
from strata.models.config import ModelConfig
from strata.parallel.serving_shard import RankShard
from tests.engine.program.programs import graph_of, step_program
from tests.largest import largest
from tests.models.batches import HandPaged, packed, random_sequences
from tests.parallel.models import random_model
from tests.parallel.ranks import run_ranks
from tests.parallel.shards import (
    Run,
    divisible_config,
    error_of_part,
    follow,
    joined,
    model_of,
    programs_of,
    relative,
    shard_of,
    together,
)

CLOSE = 1e-5
# Family, KV heads, ranks, and how many divide the keys of one.
CASES = [
    ("llama", 1, 2, 2),
    ("qwen3-biases-tied", 2, 4, 2),
    ("llama-biases-tied", 1, 4, 4),
    ("qwen2", 1, 4, 2),
    ("olmo2", 2, 4, 2),
    ("qwen3-moe", 1, 2, 2),
    ("deepseek-v2", None, 2, 2),
    ("deepseek-v3", None, 4, 2),
    ("deepseek-v3", None, 4, 4),
    ("llama", 1, 3, 3),
]


class DcpPaged(HandPaged):
    """What one rank keeps; page_size tokens of a page are here."""

    def __init__(self, config: ModelConfig, sequences: int, longest: int, kept: DcpShard, page_size: int) -> None:
        super().__init__(config, sequences, -(-longest // kept.ranks), page_size)
        self.kept = kept

    def slot(self, row: int, position: int) -> int:
        place, rank = divmod(position, self.kept.ranks)
        return super().slot(row, place) if rank == self.kept.rank else ELSEWHERE


def steps_of(caches: Sequence[HandPaged], run: Run, vocabulary: int) -> list[list[Tensor]]:
    """Of each rank, the logits of prompts, chunks beside decodes, and decodes; the first of one token alone."""
    first, second, third = random_sequences(vocabulary, (19, 13, 1))
    steps = [
        ({0: first[:11], 1: second[:2], 2: third}, [10, 12, 13]),
        ({2: [9], 1: second[2:], 0: first[11:]}, [0, 11, 19]),
        ({0: [7], 2: [60], 1: [0]}, [0, 1, 2]),
        ({1: [31]}, [0]),
        ({1: [5], 0: [3, 8, 2]}, []),
    ]
    return follow(caches, steps, run)


def whole_logits(model: Any, config: ModelConfig) -> list[Tensor]:
    graph = step_program(model, "cpu", deterministic=False).logits
    return steps_of([HandPaged(config, 3, 24)], together([graph]), config.vocab_size)[0]


@pytest.mark.parametrize(("name", "kv_heads", "size", "key_ranks"), CASES)
@pytest.mark.parametrize(
    ("page_size", "way"), [(1, "logits"), (3, "logits"), (1, "gathered_logits"), (2, "gathered_logits")]
)
def test_ranks_have_the_logits_of_one(
    name: str, kv_heads: int, size: int, key_ranks: int, page_size: int, way: str
) -> None:
    """Where queries travel, and where keys do."""
    sizes = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    if size == 3:
        sizes |= {"num_attention_heads": 6, "intermediate_size": 48}
    config = divisible_config(name, **sizes)
    model = model_of(config)
    parts, programs = programs_of(model, config, size, key_ranks=key_ranks)
    caches = [DcpPaged(part.config, 3, 24, part.kept, page_size) for part in parts]
    found = steps_of(caches, together([graph_of(one, way) for one in programs]), config.vocab_size)
    wanted = whole_logits(model, config)
    for step, expected in zip(joined(found, config.vocab_size), wanted, strict=True):
        assert step.shape == expected.shape
        assert not len(step) or relative(step, expected) < CLOSE
    # What was not kept was not written either.
    for cache, part in zip(caches, parts, strict=True):
        for pool in (*cache.keys, *cache.values):
            written = int(pool.flatten(0, 1)[:, 0, 0].isfinite().sum())
            assert written == sum(part.kept.count(length) for length in cache.lengths)


@pytest.mark.parametrize("way", ["logits", "gathered_logits"])
def test_all_choices_of_experts_are_counted_on_each_rank(way: str) -> None:
    """Rank 0 places experts by what it has counted, also of tokens whose keys another rank keeps."""
    config = divisible_config("qwen3-moe", num_key_value_heads=1)
    model = model_of(config)
    counted = []
    for key_ranks in (1, 2):
        parts = [shard_of(model, config, 2, index, key_ranks=key_ranks, expert_parallel=True) for index in range(2)]
        held = [expert_tables(part, torch.device("cpu")) for part, _ in parts]
        made = [
            step_program(own, "cpu", deterministic=False, shard=part, target={"experts": one})
            for (part, own), one in zip(parts, held, strict=True)
        ]
        graphs = [graph_of(one, way if key_ranks > 1 else "logits") for one in made]
        caches = [DcpPaged(part.config, 3, 24, part.kept, 2) for part, _ in parts]
        steps_of(caches, together(graphs), config.vocab_size)
        counted += [one.totals.tolist() for one in held]
    assert sum(counted[0][-1]) > 0
    assert all(one == counted[0] for one in counted)


def over_gloo(world: World, folder: Path, key_ranks: int) -> float:
    """The largest relative error of this rank's logits."""
    mesh = Mesh.of(world, {"tp": world.size})
    axes = {"tp": mesh.axis("tp"), "dcp": mesh.neighbours("dcp", key_ranks)}
    with pytest.raises(ValueError, match="dcp = 3 does not divide tp = 4; choose a divisor"):
        mesh.neighbours("dcp", 3)
    first = world.rank // key_ranks * key_ranks
    assert axes["dcp"].ranks == tuple(range(first, first + key_ranks))
    config = divisible_config("llama", num_key_value_heads=1)
    model = model_of(config)
    part, own = shard_of(model, config, world.size, world.rank, axes["tp"], key_ranks=key_ranks)
    part.axes["dcp"] = axes["dcp"]
    graph = step_program(own, "cpu", deterministic=False, shard=part).logits
    (found,) = steps_of([DcpPaged(part.config, 3, 24, part.kept, 2)], together([graph]), config.vocab_size)
    return error_of_part(part, found, whole_logits(model, config))


def test_ranks_over_gloo_have_the_logits_of_one(tmp_path: Path) -> None:
    assert largest(run_ranks(over_gloo, 4, tmp_path, key_ranks=2)) < CLOSE


def test_prompts_without_pages_are_not_divided() -> None:
    """Those whose vectors are asked for stand whole on every rank."""
    config = divisible_config("llama", num_key_value_heads=1)
    model = model_of(config)
    _, programs = programs_of(model, config, 2, key_ranks=2)
    graphs = [one.whole_prompts for one in programs]
    batch = packed(random_sequences(config.vocab_size, (9, 4)))
    wanted = step_program(model, "cpu", deterministic=False).hidden(batch)
    for found in together(graphs)([(batch,), (batch,)]):
        assert relative(found, wanted) < CLOSE


def test_messages_and_cached_bytes_by_hand() -> None:
    """Two decodes of 8 and 5 tokens on rank 1 of 2, which keeps 4 and 2 of them, 4 heads of 4 elements each."""
    config = divisible_config("llama", num_key_value_heads=1)
    part, own = shard_of(model_of(config), config, 2, 1, key_ranks=2)
    graph = step_program(own, "cpu", deterministic=False, shard=part).logits
    counts = operation_counts(graph)
    assert counts["all_gather"] == counts["dcp_attention"] == counts["join_heads"] == config.num_layers == 2
    assert counts["attention"] == 0
    cache = DcpPaged(part.config, 2, 24, part.kept, 2)
    batch, workload = cache.next_batch({0: [1], 1: [2]}), Workload((1, 1), (8, 5))
    costs = {
        node.operation: node.cost for node in node_costs(graph, (batch, torch.arange(2)), workload) if not node.layer
    }
    assert (costs["all_gather"].messages, costs["all_gather"].sent) == (1, 2 * 4 * 4 * 4)
    # Of 8 heads of 2 queries 4 go to the other rank, 4 elements and a logarithm in float32 each.
    assert (costs["join_heads"].messages, costs["join_heads"].sent) == (1, 2 * 4 * (4 + 1) * 4)
    kept = costs["dcp_attention"]
    assert kept.cached == 2 * (4 + 2) * 4 * 4
    assert kept.flops == 4 * (4 + 2) * 8 * 4
    assert kept.written == 2 * 8 * (4 + 1) * 4


def test_a_chunk_gathers_keys_once_a_layer() -> None:
    """Of 5 and 9 tokens in pages of 2 * 2, of which the tables have 3 each: keys and values of 4 float32 in each."""
    config = divisible_config("llama", num_key_value_heads=1)
    part, own = shard_of(model_of(config), config, 2, 1, key_ranks=2)
    graph = graph_of(step_program(own, shard=part), "gathered_logits")
    assert graph is not None
    counts = operation_counts(graph)
    assert counts["dcp_rows"] == counts["gather_tokens"] == counts["gathered_attention"] == config.num_layers
    cache = DcpPaged(part.config, 2, 12, part.kept, 2)
    batch, workload = cache.next_batch({0: [1] * 5, 1: [2] * 9}), Workload((5, 9), (5, 9))
    costs = {
        node.operation: node.cost for node in node_costs(graph, (batch, torch.arange(2)), workload) if not node.layer
    }
    rows = 2 * 3 * 2 * 2 * 4 * 4
    assert (costs["dcp_rows"].read, costs["dcp_rows"].written) == (rows, rows)
    assert (costs["gather_tokens"].messages, costs["gather_tokens"].sent) == (1, rows)
    attended = costs["gathered_attention"]
    assert attended.flops == 4 * 4 * 4 * (5 * 6 // 2 + 9 * 10 // 2)
    assert attended.cached == 2 * (5 + 9) * 4 * 4


def test_keys_are_gathered_where_they_are_fewer_bytes() -> None:
    """Of 2 ranks of 4 heads of 4 elements: 160 bytes a token joined, 32 of keys and values, 5 keys a token."""
    part, _ = shard_of(
        random_model(config := divisible_config("llama", num_key_value_heads=1), torch.float32),
        config,
        2,
        0,
        key_ranks=2,
    )
    rule = KeyGathers.of(part, torch.float32)
    assert rule == KeyGathers(key=2 * 4 * 4, joined=4 * 2 * 4 * (4 + 1))

    def pays(counts: list[int], ends: list[int], page_tokens: int = 1) -> bool:
        return rule.pays(np.array(counts), np.array(ends), page_tokens)

    assert pays([10], [50])
    assert not pays([10], [51])
    assert pays([1, 9], [20, 25])
    assert not pays([1, 9], [26, 9])
    assert not pays([1, 1], [1, 1])  # decodes alone
    # Whole pages are gathered: of sequences of 3 tokens 16 each, or 32.
    assert pays([3, 4], [3, 4], 16)
    assert not pays([3, 4], [3, 4], 32)
    assert pays([10], [49], 10)
    assert not pays([10], [49], 51)


@pytest.mark.parametrize("kept", [DcpShard(2, 0), DcpShard(3, 1), DcpShard(4, 3), ALL_KEYS])
def test_kept_keys_are_counted(kept: DcpShard) -> None:
    for length in range(23):
        here = [position for position in range(length) if position % kept.ranks == kept.rank]
        assert kept.count(length) == len(here)
        assert kept.pairs(length) == sum(key <= query for query in range(length) for key in here)


@pytest.mark.parametrize(
    ("kv_heads", "size", "key_ranks", "message"),
    [
        (4, 4, 2, "no ranks have the same of 4 KV heads, .*; leave it out, or give tensor_parallel_size=8$"),
        (8, 4, 2, "no ranks have the same of 8 KV heads, .*; leave it out$"),
        (
            2,
            4,
            4,
            "2 ranks have the same of 2 KV heads, .*; accepted are 1, 2; or give tensor_parallel_size=8$",
        ),
        (1, 4, 3, "4 ranks have the same of 1 KV heads, which it must divide; accepted are 1, 2, 4$"),
    ],
)
def test_only_what_ranks_have_alike_is_divided(kv_heads: int, size: int, key_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"decode_context_parallel_size={key_ranks} with .*{message}"):
        RankShard.of(divisible_config("llama", num_key_value_heads=kv_heads), size, 0, key_ranks=key_ranks)


@pytest.mark.parametrize(("kv_heads", "key_ranks", "size"), [(4, 2, 8), (2, 4, 8), (1, 2, 2)])
def test_as_many_ranks_as_are_told_divide(kv_heads: int, key_ranks: int, size: int) -> None:
    """Of 8 query heads; half as many ranks do not."""
    config = divisible_config("llama", num_key_value_heads=kv_heads)
    assert RankShard.of(config, size, 0, key_ranks=key_ranks).kept == DcpShard(key_ranks, 0)
    with pytest.raises(ValueError, match=f"give tensor_parallel_size={size}$"):
        RankShard.of(config, size // 2, 0, key_ranks=key_ranks)


@pytest.mark.parametrize("name", ["mistral", "gpt-oss"])
def test_other_attention_is_refused(name: str) -> None:
    model = random_model(divisible_config(name), torch.float32)
    with pytest.raises(ValueError, match="cannot"):
        shard_keys(trace(model), KeySharding(Along("dcp", 2), DcpShard(2, 0), torch.float32))


def test_a_step_sends_twice_a_layer_more() -> None:
    config = divisible_config("llama", num_key_value_heads=1)
    model = model_of(config)
    messages = []
    for key_ranks in (1, 2):
        part, own = shard_of(model, config, 2, 0, key_ranks=key_ranks)
        graph = step_program(own, "cpu", deterministic=False, shard=part).logits
        batch = DcpPaged(part.config, 1, 24, part.kept, 2).next_batch({0: [1]})
        messages.append(total(node_costs(graph, (batch, torch.arange(1)), Workload((1,), (9,)))).messages)
    assert messages[1] == messages[0] + 2 * config.num_layers
