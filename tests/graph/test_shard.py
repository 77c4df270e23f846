"""The pass that makes a rank's graph: where it puts messages, that other passes still work, and what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from strata.comm.operations import Along
from strata.comm.placement import Placement
from strata.cost.nodes import node_costs
from strata.graph.capture import capture, capture_head, operation_of
from strata.graph.compose import compose
from strata.graph.fuse import fuse
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.ranks.shard import shard
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm

from .lockstep import run_in_lockstep
from .tiny import HIDDEN, Tiny
from .tiny import packed as tiny_batch

TWO = Along("tp", 2)


def placements(model: nn.Module, **changes: Placement) -> dict[str, Placement]:
    found = {}
    for name, _ in model.named_parameters():
        kind = name.split(".")[-2]
        if kind in ("embed", "lm_head"):
            found[name] = Placement.VOCABULARY
        elif kind in ("o_proj", "down_proj"):
            found[name] = Placement.ROW if name.endswith("weight") else Placement.PER_TOKEN
        elif kind in ("before", "after", "norm"):
            found[name] = Placement.PER_TOKEN
        else:
            found[name] = Placement.COLUMN
    return found | changes


def sharded_parts(model: nn.Module, along: Along = TWO) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of a model and its head, its parameters as they are."""
    placed = placements(model)
    return tuple(shard(graph, placed, along, 0) for graph in (capture(model), capture_head(model)))  # type: ignore[return-value]


def names_of(graph: fx.GraphModule) -> list[str]:
    return [operation.name for node in graph.graph.nodes if (operation := operation_of(node)) is not None]


def test_messages_stand_after_the_products_that_need_them() -> None:
    graph, head = sharded_parts(Tiny())
    names = names_of(graph)
    assert names[:2] == ["vocabulary_embedding", "all_reduce"]
    after = [names[index + 1] for index, name in enumerate(names[:-1]) if name == "linear"]
    assert after == ["linear", "linear", "kv_write", "all_reduce", "linear", "silu_mul", "all_reduce"] * 2
    assert names_of(head) == ["linear"]  # the logits stay where they are
    assert all("module" in node.meta and "layer" in node.meta for node in (*graph.graph.nodes, *head.graph.nodes))


def test_one_rank_leaves_the_graph_as_it_is() -> None:
    model = Tiny()
    graph, head = sharded_parts(model, Along("tp", 1))
    assert names_of(graph) == names_of(capture(model))
    assert names_of(head) == names_of(capture_head(model))


def test_residual_norms_are_fused_with_the_sums_over_ranks() -> None:
    whole = fuse(merge(compose(*sharded_parts(Tiny()))))
    plain = fuse(merge(compose(capture(Tiny()), capture_head(Tiny()))))
    assert operation_counts(whole)["add_rms_norm"] == operation_counts(plain)["add_rms_norm"]
    fused = [node for node in whole.graph.nodes if getattr(operation_of(node), "name", "") == "add_rms_norm"]
    for node in fused:
        operations = [operation_of(source) for source in node.all_input_nodes]
        assert "all_reduce" in [one.name for one in operations if one is not None]
    assert operation_counts(whole)["linear"] == operation_counts(plain)["linear"]


class Biased(nn.Module):
    """A product with ROW weights and a bias, and a norm of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, 8), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        self.norm = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(linear(x, self.weight, self.bias), self.norm, 1e-5)


def test_a_bias_is_added_to_the_sum_once() -> None:
    placed = {"weight": Placement.ROW, "bias": Placement.PER_TOKEN, "norm": Placement.PER_TOKEN}
    whole, x = Biased(), torch.randn(5, 8)
    graphs = []
    for rank in range(2):
        part = Biased()
        part.load_state_dict(whole.state_dict() | {"weight": whole.weight})
        part.weight.data = whole.weight.data[:, rank * 4 : rank * 4 + 4].contiguous()
        graphs.append(shard(capture(part), placed, TWO, rank))
    for found in run_in_lockstep(graphs, [(x[:, :4],), (x[:, 4:],)]):
        torch.testing.assert_close(found, whole(x), rtol=0, atol=1e-6)


def test_gathered_rows_pass_through_messages() -> None:
    """The rows whose logits are wanted are chosen before the last all-reduce, not after the head."""
    whole = gather_after_attention(fuse(merge(compose(*sharded_parts(Tiny())))))
    nodes = list(whole.graph.nodes)
    chosen = next(index for index, node in enumerate(nodes) if "index_select" in str(node.target))
    messages = [index for index, node in enumerate(nodes) if getattr(operation_of(node), "collective", False)]
    assert max(messages) > chosen
    assert getattr(operation_of(nodes[-2]), "name", "") == "linear"


def test_costs_of_a_ranks_graph_are_known() -> None:
    graph, _ = sharded_parts(Tiny())
    batch = tiny_batch(3, 4)
    on_meta = type(batch)(*(one.to("meta") for one in (batch.tokens, batch.positions, batch.offsets)), batch.longest)
    nodes = node_costs(graph, on_meta, Workload((3, 4), (3, 4)))
    reduced = [node for node in nodes if node.operation == "all_reduce"]
    assert Counter(node.shape for node in reduced) == {(7, HIDDEN): 5}
    # Of a ring of two ranks: half of the tensor there and half back.
    assert {node.cost.sent for node in reduced} == {7 * HIDDEN * 4}


def test_a_parameter_without_a_placement() -> None:
    model = Tiny()
    placed = placements(model)
    del placed["layers.1.q_proj.weight"]
    with pytest.raises(ValueError, match=r"'layers\.1\.q_proj\.weight' has no placement"):
        shard(capture(model), placed, TWO, 0)


@pytest.mark.parametrize("placement", [Placement.ROW, Placement.VOCABULARY])
def test_what_reads_divided_parameters_must_be_known(placement: Placement) -> None:
    model = Tiny()
    changed: dict[str, Any] = {"layers.0.before.weight": placement}
    with pytest.raises(ValueError, match=r"rms_norm reads layers\.0\.before\.weight, which ranks divide"):
        shard(capture(model), placements(model) | changed, TWO, 0)
