"""Sums over ranks, the norms behind them and the products ahead as one operation: what it replaces, that it computes
the same, its cost."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from strata.comm.mesh import Axis
from strata.comm.operations import Along
from strata.comm.reduced_norm import all_reduce_add_rms_norm, linear_all_reduce_add_rms_norm
from strata.cost.nodes import node_costs, total
from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.fuse import fuse
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.ranks.fuse_messages import fuse_gemm_all_reduce, fuse_messages
from strata.graph.trace import operation_of, trace, trace_head
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Cost, Workload
from strata.kernels.norm.norm import add_rms_norm
from strata.kernels.quant.quantized import pack
from strata.kernels.quant.schemes import SCHEMES

from .test_cost import meta_batch, with_messages
from .tiny import HIDDEN, LAYERS, Tiny, packed

ALONE = Axis("tp", 1, 0, (0,), None)


def fused_before(ranks: int) -> fx.GraphModule:
    model = Tiny()
    return fuse(with_messages(merge(compose(trace(model), trace_head(model))), Along("tp", ranks)))


def test_every_sum_over_ranks_is_fused_with_its_norm() -> None:
    before = fused_before(2)
    counts = operation_counts(before)
    after = operation_counts(fuse_messages(before))
    assert (counts["all_reduce"], counts["add_rms_norm"]) == (2 * LAYERS, 2 * LAYERS)
    assert (after["all_reduce"], after["add_rms_norm"], after["all_reduce_add_rms_norm"]) == (0, 0, 2 * LAYERS)
    gather_after_attention(before)  # each row follows from its own


@pytest.mark.parametrize("swapped", [False, True])
def test_either_summand_may_be_of_all_ranks(swapped: bool) -> None:
    torch.manual_seed(0)
    graph = fused_before(1)
    batch = packed(3, 5)
    wanted = bind(graph, "cpu", axes={"tp": ALONE})(batch)
    torch.manual_seed(0)
    graph = fused_before(1)
    if swapped:
        for node in graph.graph.find_nodes(op="call_function", target=add_rms_norm):
            node.args = (node.args[1], node.args[0], *node.args[2:])
    assert operation_counts(fuse_messages(graph))["all_reduce_add_rms_norm"] == 2 * LAYERS
    found = bind(graph, "cpu", axes={"tp": ALONE})(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_it_saves_the_sum_over_ranks_on_its_way_through_memory() -> None:
    workload = Workload((2, 1), (2, 4))

    def cost(graph: fx.GraphModule) -> Cost:
        return total(node_costs(graph, meta_batch(workload), workload))

    whole = fused_before(2)
    apart = cost(whole)
    together = cost(fuse_messages(whole))
    written_and_read = 2 * 2 * LAYERS * workload.tokens * HIDDEN * 4
    assert apart - together == Cost(read=written_and_read // 2, written=written_and_read // 2)


def test_products_that_nothing_else_reads_are_sent() -> None:
    graph = fuse_messages(fused_before(2))
    before = operation_counts(graph)
    after = operation_counts(fuse_gemm_all_reduce(graph))
    assert after["linear_all_reduce_add_rms_norm"] == before["all_reduce_add_rms_norm"] == 2 * LAYERS
    assert after["linear"] == before["linear"] - 2 * LAYERS
    assert "all_reduce_add_rms_norm" not in after
    fused = [node for node in graph.graph.nodes if operation_of(node) is linear_all_reduce_add_rms_norm]
    assert [node.meta["layer"] for node in fused] == [layer for layer in range(LAYERS) for _ in "od"]
    assert ".o_proj+" in fused[0].meta["module"]
    gather_after_attention(graph)  # each row follows from its own


def test_products_with_a_bias_other_readers_or_packed_weights_are_left_alone() -> None:
    graph = fuse_messages(fused_before(2))
    first, second, third, _ = graph.graph.find_nodes(op="call_function", target=all_reduce_add_rms_norm)
    product = first.args[0]
    product.args = (*product.args[:2], product.args[1])
    with graph.graph.inserting_before(second):
        added = graph.graph.call_function(torch.add, (second.args[0], 1))
        added.meta = dict(second.meta)
    second.args = (*second.args[:2], added, *second.args[3:])
    third.args[0].args = (third.args[0].args[0], pack(torch.randn(HIDDEN, HIDDEN), SCHEMES["int8"]), None)
    assert operation_counts(fuse_gemm_all_reduce(graph))["linear_all_reduce_add_rms_norm"] == 2 * LAYERS - 3


def test_a_product_that_is_sent_is_not_written_and_computes_the_same() -> None:
    workload = Workload((2, 1), (2, 4))
    torch.manual_seed(0)
    graph = fuse_messages(fused_before(2))
    apart = total(node_costs(graph, meta_batch(workload), workload))
    together = total(node_costs(fuse_gemm_all_reduce(graph), meta_batch(workload), workload))
    moved = 2 * LAYERS * workload.tokens * HIDDEN * 4
    assert apart - together == Cost(read=moved, written=moved)
    found = []
    for sent in (False, True):
        torch.manual_seed(0)
        graph = fuse_messages(fused_before(1))
        graph = fuse_gemm_all_reduce(graph) if sent else graph
        found.append(bind(graph, "cpu", axes={"tp": ALONE})(packed(3, 5)))
    assert torch.equal(*found)


def test_the_cost_of_a_product_that_is_sent_is_the_hand_count() -> None:
    x, weight, residual, norm_weight = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((3, 16), (8, 16), (3, 8), (8,))
    )
    found = linear_all_reduce_add_rms_norm.cost(
        x, Along("tp", 2), weight, residual, norm_weight, 1e-5, workload=Workload((3,), (3,))
    )
    # Products, half of the sums over ranks (the other rank makes the rest), the residual's, and four of each in norms.
    flops = 2 * 3 * 16 * 8 + 3 * 8 // 2 + 3 * 8 + 4 * 3 * 8
    read = 2 * (3 * 16 + 8 * 16 + 3 * 8 + 8)
    assert found == Cost(flops, read, 2 * 2 * 3 * 8, weights=2 * (8 * 16 + 8), messages=1, sent=2 * 3 * 8)
