"""A model cut into stages: they make together what it makes, write pools of their own, and are costed like it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from strata.comm.operations import Along
from strata.cost.nodes import node_costs
from strata.graph.capture import capture, operation_of
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.ranks.stages import exchange, stage
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.state.paged import PagedKV
from strata.models.batch import Batch

from .tiny import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, Linear, Tiny, packed


def on_meta(batch: Batch) -> Batch:
    return Batch(*(one.to("meta") for one in (batch.tokens, batch.positions, batch.offsets)), batch.longest)


def test_stages_one_after_the_other_are_the_model() -> None:
    model, batch = Tiny("qk"), packed(5, 3)
    whole = capture(model)
    first, last = stage(whole, 0, 1, model), stage(whole, 1, 2, model)
    hidden = first(batch)
    assert hidden.shape == (8, HIDDEN)
    assert torch.equal(last(batch, hidden), model(batch))
    assert torch.equal(stage(whole, 0, LAYERS, model)(batch), model(batch))
    assert torch.equal(whole(batch), model(batch)), "the graph stays as it is"


def test_each_operation_is_in_one_stage() -> None:
    model = Tiny()
    whole = capture(model)
    parts = [stage(whole, layer, layer + 1, model) for layer in range(LAYERS)]
    assert sum(map(operation_counts, parts[1:]), operation_counts(parts[0])) == operation_counts(whole)
    for layer, part in enumerate(parts):
        named = {name for node in part.graph.nodes for name in node.meta.get("parameters", ())}
        assert {int(name.split(".")[1]) for name in named if name.startswith("layers")} == {layer}
        assert ("embed.weight" in named, "norm.weight" in named) == (layer == 0, layer == LAYERS - 1)
        assert all("module" in node.meta and "layer" in node.meta for node in part.graph.nodes if node.op != "get_attr")


def test_the_pools_of_a_stage_begin_with_its_first_layer() -> None:
    model = Tiny()
    last = stage(capture(model), 1, 2, model)
    keys, values = (torch.zeros(2, 4, KV_HEADS, HEAD_DIM) for _ in range(2))
    tables, slots = torch.tensor([[1]], dtype=torch.int32), torch.tensor([4, 5, 6], dtype=torch.int32)
    pages = PagedKV((keys,), (values,), tables, torch.tensor([3], dtype=torch.int32), slots)
    batch = packed(3)
    hidden = torch.randn(3, HIDDEN)
    found = last(dataclasses.replace(batch, pages=pages), hidden)
    assert keys[1, :3].ne(0).all()
    assert keys[0].eq(0).all()
    torch.testing.assert_close(found, last(batch, hidden))


def test_a_stage_is_costed_and_fused() -> None:
    model, batch = Tiny(), packed(3, 4)
    whole = capture(model)
    workload = Workload((3, 4), (3, 4))
    hidden = torch.empty(7, HIDDEN, device="meta")
    first, last = stage(whole, 0, 1, model), stage(whole, 1, 2, model)
    costs = node_costs(first, on_meta(batch), workload) + node_costs(last, (on_meta(batch), hidden), workload)
    assert [(node.operation, node.layer, node.cost) for node in costs] == [
        (node.operation, node.layer, node.cost) for node in node_costs(whole, on_meta(batch), workload)
    ]
    handed = torch.randn(7, HIDDEN)
    wanted = last(batch, handed)
    torch.testing.assert_close(fuse(merge(last))(batch, handed), wanted, rtol=0, atol=1e-5)


def test_messages_stand_at_the_ends_of_a_stage() -> None:
    """7 tokens of 24 numbers of 4 bytes go from stage to stage."""
    model, batch, along = Tiny(), packed(3, 4), Along("pp", 2)
    whole, workload = capture(model), Workload((3, 4), (3, 4))
    first, last = (
        exchange(stage(whole, layer, layer + 1, model), along, layer, HIDDEN, torch.float32) for layer in range(2)
    )
    costs = [node_costs(part, on_meta(batch), workload) for part in (first, last)]
    assert [node.operation for node in costs[0]].count("send_next") == 1
    assert costs[0][-1].operation == "send_next"
    assert (costs[0][-1].cost.sent, costs[0][-1].cost.messages) == (7 * 24 * 4, 1)
    assert costs[1][0].operation == "receive_previous"
    assert costs[1][0].cost.written == 7 * 24 * 4
    assert "send_next" not in [node.operation for node in costs[1]]
    assert all(len([node for node in part.graph.nodes if node.op == "placeholder"]) == 1 for part in (first, last))
    assert any(operation_of(node) is not None for node in fuse(merge(last)).graph.nodes)


@pytest.mark.parametrize(("first", "end"), [(1, 1), (-1, 1), (0, 3), (2, 1)])
def test_layers_that_are_not_there(first: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"layers {first} to {end} does not lie within the 2 layers"):
        stage(capture(Tiny()), first, end, Tiny())


class Skipping(nn.Module):
    """Its last layer reads what the first one made and what the one between did."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Linear(4, 4) for _ in range(3)]).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layers[0](x)
        second: Tensor = self.layers[1](first)
        third: Tensor = self.layers[2](first)
        return second + third


def test_one_value_alone_passes_from_stage_to_stage() -> None:
    model = Skipping()
    x, whole = torch.randn(2, 4), capture(model)
    first, rest = stage(whole, 0, 1, model), stage(whole, 1, 3, model)
    assert torch.equal(rest(x, first(x)), model(x))
    with pytest.raises(ValueError, match="one value passes from layer to layer, and here pass: linear, linear_1"):
        stage(whole, 0, 2, model)
