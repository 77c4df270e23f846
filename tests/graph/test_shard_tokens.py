"""Ranks that divide the tokens of steps have the logits of one that runs all of them, and equal pages, every family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from strata.comm.operations import Along
from strata.cost.nodes import node_costs, total
from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.ranks.shard_tokens import shard_tokens
from strata.graph.trace import operation_of, trace, trace_head
from strata.hardware.roofline import Workload
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.models.batch import Batch
from strata.models.layers import CausalLM
from tests.models.batches import HandPaged, random_sequences
from tests.models.checkpoints import FAMILY_CONFIGS

from .families import families, model_of
from .lockstep import run_in_lockstep
from .tiny import Tiny

# Of each rank and step: sequence, first and end of its new tokens. The second sequence has four tokens before the
# second step, and the first rank a padding row in each.
STEPS = (
    [[(0, 0, 2), (0, 7, 9), (1, 0, 2)], [(0, 2, 7), (1, 2, 4)]],
    [[(1, 4, 6), (1, 9, 10)], [(0, 9, 10), (1, 6, 9)]],
)
ROWS = 7, 4
# Where the last tokens are, on each rank, and among what both take: that of the first sequence in row 3 of the first
# rank, then in row 0 of the second.
DRAWN = (([3, 0], [0, 6]), [0, 3]), (([0, 2], [0, 0]), [2, 1])
AXES = {"cp": Along("cp", 2)}


def graph_of(model: CausalLM, *, fused: bool) -> fx.GraphModule:
    graph = merge(compose(trace(model), trace_head(model)))
    return gather_after_attention(fuse_gated_products(fuse(graph)) if fused else graph)


def batch_of(shares: Sequence[Any], index: int, rows: int, cache: HandPaged, tokens: Sequence[Sequence[int]]) -> Batch:
    """Of one rank, with a sequence of length 0 for padding, and where the keys and values of all ranks go."""
    own = shares[index]
    counts = [end - first for _, first, end in own]
    padding = rows - sum(counts)
    ids = [tokens[sequence][at] for sequence, first, end in own for at in range(first, end)] + [0] * padding
    positions = [at for _, first, end in own for at in range(first, end)] + [0] * padding
    offsets = [sum(counts[:at]) for at in range(len(counts) + 1)] + [rows]
    slots = []
    for share in shares:
        at = [(sequence, place) for sequence, first, end in share for place in range(first, end)]
        size = cache.page_size
        here = [int(cache.tables[sequence, place // size]) * size + place % size for sequence, place in at]
        slots += here + [-1] * (rows - len(here))
    tables = cache.tables[[*(sequence for sequence, _, _ in own), 0]]
    lengths = int32([*(end for _, _, end in own), 0])
    pages = PagedKV(cache.keys, cache.values, tables, lengths, int32(slots))
    return Batch(int32(ids), int32(positions), int32(offsets), max(counts), pages)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@families
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_have_the_logits_of_one(config: dict[str, Any], fused: bool) -> None:
    model, read = model_of(config)
    tokens = random_sequences(read.vocab_size, (10, 10))
    one = bind(graph_of(model, fused=fused), "cpu")
    graphs = [bind(shard_tokens(graph_of(model, fused=fused), Along("cp", 2)), "cpu", axes=AXES) for _ in range(2)]
    whole, *caches = (HandPaged(read, 2, 12) for _ in range(3))

    first = whole.next_batch({0: tokens[0][:9], 1: tokens[1][:4]})
    wanted = [one(first, int32([8, 12]))]
    wanted.append(one(whole.next_batch({0: tokens[0][9:], 1: tokens[1][4:]}), int32([0, 6])))
    for shares, rows, expected, (own_rows, chosen) in zip(STEPS, ROWS, wanted, DRAWN, strict=True):
        batches = [batch_of(shares, index, rows, cache, tokens) for index, cache in enumerate(caches)]
        found = run_in_lockstep(
            graphs, [(batch, int32(own), int32(chosen)) for batch, own in zip(batches, own_rows, strict=True)]
        )
        for logits in found:
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(*found)
    for cache in caches:
        for kept, expected in zip((*cache.keys, *cache.values), (*whole.keys, *whole.values), strict=True):
            torch.testing.assert_close(kept, expected, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_sends_its_keys_and_values_once(fused: bool) -> None:
    model, read = model_of(FAMILY_CONFIGS[0][1])
    graph = shard_tokens(graph_of(model, fused=fused), Along("cp", 2))
    messages = [operation_of(node) for node in graph.graph.nodes]
    messages = [one for one in messages if one is not None and one.collective]
    assert [one.name for one in messages] == ["gather_keys_values"] * read.num_layers + ["gather_tokens"] * 2

    shares = STEPS[0]
    batch = batch_of(shares, 0, 7, HandPaged(read, 2, 12), random_sequences(read.vocab_size, (10, 10)))
    cost = total(node_costs(graph, (batch, int32([3, 0]), int32([0, 3])), Workload((2, 2, 2), (2, 9, 2))))
    kept = 2 * 7 * read.num_kv_heads * read.head_dim
    assert cost.messages == read.num_layers + 2
    wanted = 2 * (read.num_heads * read.head_dim + read.hidden_size)  # two rows of attention, and the residual
    assert cost.sent == 4 * (read.num_layers * kept + wanted)


def test_keys_are_written_before_attention_reads_them() -> None:
    model, _ = model_of(FAMILY_CONFIGS[0][1])
    nodes = list(shard_tokens(graph_of(model, fused=True), Along("cp", 2)).graph.nodes)
    writes = [at for at, node in enumerate(nodes) if operation_of(node) is kv_write]
    reads = [at for at, node in enumerate(nodes) if (found := operation_of(node)) is not None and found.reads_state]
    assert sorted((*writes, *reads)) == [at for pair in zip(writes, reads, strict=True) for at in pair]


def test_what_mixes_tokens_before_attention_is_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tiny()

        def forward(self, batch: Any) -> Tensor:
            x = self.inner.embed(batch.tokens)
            return self.inner.layers[0](x.cumsum(0), batch)

    with pytest.raises(ValueError, match="cumsum mixes tokens"):
        shard_tokens(gather_after_attention(trace(Mixing())), Along("cp", 2))
