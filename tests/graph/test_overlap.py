"""Rows in parts: the same results, messages begun before the products that hide them and awaited behind, and costs."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from torch import Tensor, fx

from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_reduce
from strata.comm.under_way import finish_all_reduce, start_all_reduce
from strata.cost.nodes import node_costs, total
from strata.graph.bind import bind
from strata.graph.capture import capture, capture_head, operation_of
from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.ranks.fuse_messages import fuse_messages
from strata.graph.ranks.overlap import overlap
from strata.graph.ranks.row_parts import AT_HALF, PARTS, RowDivision, most_rows, row_part
from strata.graph.walk import meta_indices, operation_counts
from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.linear import linear
from strata.kernels.op import Operation

from .lockstep import run_in_lockstep
from .test_cost import meta_batch, with_messages
from .tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, Tiny, packed

ALONE = Axis("tp", 1, 0, (0,), None)


def prompts_graph(ranks: int, *, fused: bool = True) -> fx.GraphModule:
    """Of steps with prompts, before messages are fused."""
    torch.manual_seed(0)
    model = Tiny()
    whole = with_messages(merge(compose(capture(model), capture_head(model))), Along("tp", ranks))
    return gather_after_attention(fuse_gated_products(fuse(whole)) if fused else whole)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("lengths", [(3, 5), (1,), (2, 700, 31)])
def test_results_are_those_of_all_rows_together(fused: bool, lengths: tuple[int, ...]) -> None:
    batch, rows = packed(*lengths), torch.tensor([sum(lengths) - 1, 0], dtype=torch.int32)
    wanted = bind(prompts_graph(1, fused=fused), "cpu", axes={"tp": ALONE})(batch, rows)
    found = bind(fuse_messages(overlap(prompts_graph(1, fused=fused))), "cpu", axes={"tp": ALONE})(batch, rows)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_sums_over_ranks_are_of_their_own_part() -> None:
    batch, rows = packed(3, 6), torch.tensor([8], dtype=torch.int32)

    def of_two(graphs: list[fx.GraphModule]) -> Tensor:
        for graph in graphs:
            bind(graph, "cpu", axes={"tp": Along("tp", 2)})
        first, second = run_in_lockstep(graphs, [(batch, rows)] * 2)
        torch.testing.assert_close(first, second)
        return first

    wanted = of_two([prompts_graph(2) for _ in range(2)])
    found = of_two([overlap(prompts_graph(2)) for _ in range(2)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_norms_behind_messages_wait_for_them() -> None:
    graph = fuse_messages(overlap(prompts_graph(2)))
    counts = operation_counts(graph)
    assert counts["finish_add_rms_norm"] == counts["start_all_reduce"] == 2 * PARTS
    assert counts["finish_all_reduce"] == 0


def test_each_message_travels_while_the_other_part_is_computed() -> None:
    """Between two attentions: o, message, gate/up and down, message, q/k/v, each part of the rows in turn."""
    graph = overlap(prompts_graph(2))
    named: dict[Operation, str] = {start_all_reduce: "start", finish_all_reduce: "finish", all_reduce: "whole"}
    order = []
    for node in graph.graph.nodes:
        operation = operation_of(node)
        if operation is not None and (operation in named or operation.product):
            order.append(named.get(operation, node.meta["module"].rpartition(".")[2]))
    first, stretch, last = order[:1], order[1:15], order[15:]
    assert first == ["q_proj&k_proj&v_proj"]  # no message leads there
    assert stretch == [
        *("o_proj", "start", "o_proj", "start"),
        *("finish", "gate_proj&up_proj+silu_mul", "down_proj", "start"),
        *("finish", "gate_proj&up_proj+silu_mul", "down_proj", "start"),
        *("finish", "q_proj&k_proj&v_proj"),
    ]
    assert last == [
        *("finish", "q_proj&k_proj&v_proj"),
        *("o_proj", "whole", "gate_proj&up_proj+silu_mul", "down_proj", "whole", "lm_head"),
    ]
    assert LAYERS == 2


def test_only_what_attention_reads_and_the_last_residual_are_put_together() -> None:
    tokens = 9
    workload = Workload((tokens,), (tokens,))

    def cost(graph: fx.GraphModule) -> Cost:
        return total(node_costs(graph, (meta_batch(workload), meta_indices(1)), workload))

    with torch.device("meta"):
        whole, parted = prompts_graph(2), overlap(prompts_graph(2))
    counts = operation_counts(parted)
    assert counts["cat"] == 2
    more = cost(parted) - cost(whole)
    written = tokens * ((HEADS + 2 * KV_HEADS) * HEAD_DIM + HIDDEN) * 4
    assert (more.flops, more.sent, more.written) == (0, 0, written)
    assert more.messages == 2 * (PARTS - 1)  # of the two sums between the attentions


def test_what_treats_rows_together_leaves_its_rows_together() -> None:
    graph = prompts_graph(2)
    (first, *_) = graph.graph.find_nodes(op="call_function", target=all_reduce)
    with graph.graph.inserting_after(first):
        mixed = graph.graph.call_function(torch.flip, (first, (0,)))
    mixed.meta = dict(first.meta)
    first.replace_all_uses_with(mixed, delete_user_cb=lambda user: user is not mixed)
    assert sums_over_ranks(overlap(graph)) == {"all_reduce": 2 * LAYERS}


def test_a_sum_whose_summand_others_read_is_not_made_in_its_memory() -> None:
    graph = prompts_graph(2)
    (first, *_) = graph.graph.find_nodes(op="call_function", target=all_reduce)
    product = first.args[0]
    assert isinstance(product, fx.Node)
    assert product.target is linear
    with graph.graph.inserting_after(first):
        both = graph.graph.call_function(operator.add, (first, product))
    both.meta = dict(first.meta)
    first.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    found = sums_over_ranks(overlap(graph))
    assert found == {"all_reduce": PARTS + 2, "start_all_reduce": PARTS}


def sums_over_ranks(graph: fx.GraphModule) -> Counter[str]:
    operations = map(operation_of, graph.graph.nodes)
    return Counter(one.name for one in operations if one is not None and one.collective and "reduce" in one.name)


# Of a rank of two of 70B: gate and up, down, q/k/v and o, on 132 processors.
OF_70B = RowDivision(132, ((28672, 8192), (8192, 14336), (5120, 8192), (8192, 4096)))


@pytest.mark.parametrize("rows", [0, 1, 2, 255, 256, 257, 300, 1000, 4096, 8192])
@pytest.mark.parametrize("division", [AT_HALF, OF_70B])
def test_parts_are_all_rows_in_order(rows: int, division: RowDivision) -> None:
    x = torch.arange(rows)
    found = [row_part(x, index, division) for index in range(PARTS)]
    assert torch.equal(torch.cat(found), x)
    if rows >= 512:
        assert len(found[0]) % 128 == 0
        assert abs(len(found[0]) - len(found[1])) < (256 if division is AT_HALF else 1280)
    assert max(map(len, found)) <= most_rows(rows)
    assert all(len(one) > 0 for one in found) or rows < PARTS


def test_rows_are_divided_where_products_fill_their_last_round() -> None:
    """gate and up alone: 112 tiles of columns by 33 tiles of rows are 28 rounds of 132 exactly, and by 31 are 27."""
    gate_up = RowDivision(132, ((28672, 8192),))
    assert [gate_up.rounds(rows * 128, 28672) for rows in (32, 33, 31, 64)] == [28, 28, 27, 55]
    assert gate_up.boundary(8192) == 33 * 128
    # 56 tiles of columns: 32 tiles of rows take 14 rounds, 64 take 28, so the half is as good as any.
    assert RowDivision(132, ((14336, 4096),)).boundary(8192) == 4096
