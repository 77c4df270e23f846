"""Sums over ranks and the norms behind them as one operation: what it replaces, that it computes the same, its cost."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from strata.comm.mesh import Axis
from strata.comm.operations import Along
from strata.graph.bind import bind
from strata.graph.capture import capture, capture_head
from strata.graph.compose import compose
from strata.graph.cost import node_costs, operation_counts, total
from strata.graph.fuse import fuse
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.ranks.fuse_messages import fuse_messages
from strata.hardware.roofline import Cost, Workload
from strata.kernels.norm.norm import add_rms_norm

from .test_cost import meta_batch, with_messages
from .tiny import HIDDEN, LAYERS, Tiny, packed

ALONE = Axis("tp", 1, 0, (0,), None)


def fused_before(ranks: int) -> fx.GraphModule:
    model = Tiny()
    return fuse(with_messages(merge(compose(capture(model), capture_head(model))), Along("tp", ranks)))


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
