"""The graphs of ranks: where messages stand, products summed in slices, and models cut into stages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from strata.comm.operations import Along
from strata.comm.placement import Placement
from strata.cost.nodes import node_costs
from strata.graph.compose import compose
from strata.graph.fuse import fuse
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.ranks.shard import shard
from strata.graph.ranks.slice_products import slice_products
from strata.graph.ranks.stages import exchange, stage
from strata.graph.trace import operation_of, trace, trace_head
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm
from strata.kernels.state.paged import PagedKV
from strata.models.batch import Batch

from .lockstep import run_in_lockstep
from .tiny import HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, Linear, Tiny, packed
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
    return tuple(shard(graph, placed, along, 0) for graph in (trace(model), trace_head(model)))  # type: ignore[return-value]


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
    assert names_of(graph) == names_of(trace(model))
    assert names_of(head) == names_of(trace_head(model))


def test_residual_norms_are_fused_with_the_sums_over_ranks() -> None:
    whole = fuse(merge(compose(*sharded_parts(Tiny()))))
    plain = fuse(merge(compose(trace(Tiny()), trace_head(Tiny()))))
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
        graphs.append(shard(trace(part), placed, TWO, rank))
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
        shard(trace(model), placed, TWO, 0)


@pytest.mark.parametrize("placement", [Placement.ROW, Placement.VOCABULARY])
def test_what_reads_divided_parameters_must_be_known(placement: Placement) -> None:
    model = Tiny()
    changed: dict[str, Any] = {"layers.0.before.weight": placement}
    with pytest.raises(ValueError, match=r"rms_norm reads layers\.0\.before\.weight, which ranks divide"):
        shard(trace(model), placements(model) | changed, TWO, 0)


ROW = {"weight": Placement.ROW, "bias": Placement.PER_TOKEN, "other": Placement.COLUMN}


class Two(nn.Module):
    """A product whose width ranks divide, and one whose rows they divide."""

    def __init__(self, width: int = 48, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype), requires_grad=False)

        self.weight, self.bias, self.other = drawn(64, width), drawn(64), drawn(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.weight, self.bias), self.other, None)


def calls(graph: fx.GraphModule) -> list[Any]:
    found: list[Any] = []
    for node in graph.graph.nodes:
        operation = operation_of(node)
        if node.op.startswith("call"):
            found.append(operation.name if operation is not None else getattr(node.target, "__name__", node.target))
    return found


@pytest.mark.parametrize(
    ("dtype", "ranks", "expected"),
    [
        (torch.float32, 1, ["sliced_linear", "add", "linear"]),
        (torch.bfloat16, 1, ["sliced_linear", "add", "linear"]),
        (torch.float32, 2, ["sliced_linear", "all_reduce", "add", "linear"]),
        (torch.bfloat16, 2, ["sliced_linear", "all_reduce", "to", "add", "linear"]),
        (torch.bfloat16, 4, ["sliced_linear", "pairwise_all_reduce", "to", "add", "linear"]),
    ],
)
def test_products_that_ranks_sum_are_sliced(dtype: torch.dtype, ranks: int, expected: list[str]) -> None:
    graph = shard(trace(Two(48 // ranks, dtype)), ROW, Along("tp", ranks), 0)
    slice_products(graph, ROW, ranks)
    assert calls(graph) == expected
    (sliced,) = [node for node in graph.graph.nodes if node.name == "linear"]
    assert sliced.args[2:] == (8 // ranks, ranks > 1)


@pytest.mark.parametrize(
    ("width", "ranks", "slices"), [(24, 1, 8), (20, 1, 4), (7, 1, 1), (12, 2, 4), (10, 2, 2), (8, 3, 2), (1, 8, 1)]
)
def test_slices_of_a_width(width: int, ranks: int, slices: int) -> None:
    """Of the width that a rank holds; 3 ranks of width 8 have one of 24, and 2 slices each."""
    graph = slice_products(shard(trace(Two(width)), ROW, Along("tp", ranks), 0), ROW, ranks)
    (sliced,) = [node for node in graph.graph.nodes if node.name == "linear"]
    assert sliced.args[2] == slices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_is_added_after_the_sum(dtype: torch.dtype) -> None:
    whole, x = Two(48, dtype), torch.randn(5, 48).to(dtype)
    graphs = []
    for rank in range(2):
        part = Two(24, dtype)
        part.weight.data = whole.weight.data.chunk(2, 1)[rank].contiguous()
        part.bias, part.other = whole.bias, whole.other
        graphs.append(slice_products(shard(trace(part), ROW, Along("tp", 2), rank), ROW, 2))
    (first, second) = run_in_lockstep(graphs, [(x[:, :24],), (x[:, 24:],)])
    alone = slice_products(trace(whole), ROW, 1)(x)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 0.5)


def on_meta(batch: Batch) -> Batch:
    return Batch(*(one.to("meta") for one in (batch.tokens, batch.positions, batch.offsets)), batch.longest)


def test_stages_one_after_the_other_are_the_model() -> None:
    model, batch = Tiny("qk"), packed(5, 3)
    whole = trace(model)
    first, last = stage(whole, 0, 1, model), stage(whole, 1, 2, model)
    hidden = first(batch)
    assert hidden.shape == (8, HIDDEN)
    assert torch.equal(last(batch, hidden), model(batch))
    assert torch.equal(stage(whole, 0, LAYERS, model)(batch), model(batch))
    assert torch.equal(whole(batch), model(batch)), "the graph stays as it is"


def test_each_operation_is_in_one_stage() -> None:
    model = Tiny()
    whole = trace(model)
    parts = [stage(whole, layer, layer + 1, model) for layer in range(LAYERS)]
    assert sum(map(operation_counts, parts[1:]), operation_counts(parts[0])) == operation_counts(whole)
    for layer, part in enumerate(parts):
        named = {name for node in part.graph.nodes for name in node.meta.get("parameters", ())}
        assert {int(name.split(".")[1]) for name in named if name.startswith("layers")} == {layer}
        assert ("embed.weight" in named, "norm.weight" in named) == (layer == 0, layer == LAYERS - 1)
        assert all("module" in node.meta and "layer" in node.meta for node in part.graph.nodes if node.op != "get_attr")


def test_the_pools_of_a_stage_begin_with_its_first_layer() -> None:
    model = Tiny()
    last = stage(trace(model), 1, 2, model)
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
    whole = trace(model)
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
    whole, workload = trace(model), Workload((3, 4), (3, 4))
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
        stage(trace(Tiny()), first, end, Tiny())


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
    x, whole = torch.randn(2, 4), trace(model)
    first, rest = stage(whole, 0, 1, model), stage(whole, 1, 3, model)
    assert torch.equal(rest(x, first(x)), model(x))
    with pytest.raises(ValueError, match="one value passes from layer to layer, and here pass: linear, linear_1"):
        stage(whole, 0, 2, model)
