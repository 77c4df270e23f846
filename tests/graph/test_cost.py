"""Costs of a small model against a count on paper."""

from __future__ import annotations

import operator

import pytest
import torch
from rich.console import Console
from torch import Tensor, fx, nn

from strata.comm.operations import Along, all_gather, all_reduce
from strata.cost.draw import duration, quantity, rows_by, table
from strata.cost.nodes import node_costs, parameter_count, total
from strata.cost.step_costs import step_costs
from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.trace import trace, trace_head
from strata.graph.walk import meta_indices, meta_pages
from strata.hardware.links import link_of
from strata.hardware.roofline import Workload, floor
from strata.hardware.specs import device
from strata.kernels.linear.linear import linear
from strata.models.batch import Batch
from strata.plan.meta_model import find_config, meta_model

from .tiny import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCABULARY, Tiny

WORKLOAD = Workload(new=(3, 1), total=(3, 9))
BYTES = 4  # float32
LINEARS = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INNER  # weights of a layer


def meta_batch(workload: Workload) -> Batch:
    pages = meta_pages(workload, layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    tokens = meta_indices(workload.tokens)
    return Batch(tokens, tokens, meta_indices(len(workload.new) + 1), max(workload.new), pages)


def costs(workload: Workload = WORKLOAD):
    with torch.device("meta"):
        model = Tiny()
    return node_costs(merge(trace(model)), meta_batch(workload), workload)


def test_linear_flops_and_bytes() -> None:
    tokens = WORKLOAD.tokens
    linears = [node for node in costs() if node.operation == "linear"]
    assert [node.module for node in linears[:2]] == ["layers.0.q_proj&k_proj&v_proj", "layers.0.o_proj"]
    cost = total(linears)
    assert cost.flops == 2 * tokens * LINEARS * LAYERS
    assert cost.weights == BYTES * LINEARS * LAYERS
    inputs = HIDDEN + HEADS * HEAD_DIM + HIDDEN + INNER
    outputs = (HEADS + 2 * KV_HEADS) * HEAD_DIM + HIDDEN + 2 * INNER + HIDDEN
    assert cost.read - cost.weights == BYTES * tokens * inputs * LAYERS
    assert cost.written == BYTES * tokens * outputs * LAYERS


def test_attention_counts_visible_pairs_and_cached_tokens() -> None:
    nodes = [node for node in costs() if node.operation == "attention"]
    assert [node.layer for node in nodes] == list(range(LAYERS))
    pairs = (1 + 2 + 3) + 9
    assert nodes[0].cost.flops == 4 * HEADS * HEAD_DIM * pairs
    queries = BYTES * 4 * HEADS * HEAD_DIM
    assert nodes[0].cost.read == queries + BYTES * 2 * (3 + 9) * KV_HEADS * HEAD_DIM
    assert nodes[0].shape == (4, HEADS, HEAD_DIM)


def test_residual_additions_are_counted_and_views_are_not() -> None:
    nodes = costs()
    additions = [node for node in nodes if node.operation == "add"]
    assert len(additions) == 2 * LAYERS
    assert total(additions).flops == 2 * LAYERS * 4 * HIDDEN
    assert total(additions).bytes == 3 * BYTES * 2 * LAYERS * 4 * HIDDEN
    assert {node.operation for node in nodes} == {
        "embedding", "rms_norm", "linear", "kv_write", "attention", "add", "silu_mul",
    }  # fmt: skip


def test_parameters_are_counted_once() -> None:
    model = Tiny()
    everything = sum(parameter.numel() for parameter in model.parameters())
    forward = node_costs(trace(model), meta_batch(WORKLOAD), WORKLOAD)
    head = node_costs(trace_head(model), torch.empty(2, HIDDEN, device="meta"), WORKLOAD)
    assert parameter_count(forward + head) == everything
    assert parameter_count(costs()) == everything - VOCABULARY * HIDDEN
    model.lm_head.weight = model.embed.weight
    tied = node_costs(trace_head(model), torch.empty(2, HIDDEN, device="meta"), WORKLOAD)
    forward = node_costs(trace(model), meta_batch(WORKLOAD), WORKLOAD)
    assert parameter_count(forward + tied) == everything - VOCABULARY * HIDDEN


def test_bound_and_unbound_graphs_cost_the_same() -> None:
    graph = merge(trace(Tiny()))
    before = node_costs(graph, meta_batch(WORKLOAD), WORKLOAD)
    assert node_costs(bind(graph, "cpu"), meta_batch(WORKLOAD), WORKLOAD) == before


@pytest.mark.parametrize("workload", [WORKLOAD, Workload((1,) * 5, (7, 30, 2, 1, 16)), Workload((40,), (64,))])
def test_any_step_follows_from_one_look_at_the_graph(workload: Workload) -> None:
    with torch.device("meta"):
        model = Tiny()
    graph = gather_after_attention(merge(compose(trace(model), trace_head(model))))

    def ones(tokens: int, rows: int) -> tuple[Batch, Tensor]:
        return meta_batch(Workload((1,) * tokens, (1,) * tokens)), meta_indices(rows)

    rows, tokens = len(workload.new), workload.tokens
    step = step_costs(graph, ones).step(workload, rows)
    nodes = node_costs(graph, (meta_batch(workload), meta_indices(rows)), workload)
    assert step == total(nodes).in_step
    # Behind the last attention only the sampled rows are computed: its output projection and MLP, two additions and the
    # last norm, and the head.
    behind = HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INNER
    linears = 2 * tokens * (LAYERS * LINEARS - behind) + 2 * rows * (behind + VOCABULARY * HIDDEN)
    assert sum(node.cost.flops for node in nodes if node.operation == "linear") == linears
    weights = LINEARS * LAYERS + HIDDEN * (2 * LAYERS + 1) + VOCABULARY * HIDDEN + tokens * HIDDEN
    cached = 2 * sum(workload.total) * KV_HEADS * HEAD_DIM * LAYERS
    assert step.bytes == BYTES * (weights + cached)
    gathered = [node for node in nodes if node.operation == "index_select"]
    assert [node.cost.bytes for node in gathered] == [
        4 * rows + 2 * BYTES * rows * n for n in (HEADS * HEAD_DIM, HIDDEN)
    ]


def with_messages(graph: fx.GraphModule, along: Along) -> fx.GraphModule:
    """As on one of several ranks: what o_proj and down_proj make is added up, the logits are gathered."""
    for node in list(graph.graph.nodes):
        last = node.meta.get("module", "").rpartition(".")[2]
        more = {"o_proj": (all_reduce, along), "down_proj": (all_reduce, along), "lm_head": (all_gather, along, -1)}
        if node.target is linear and last in more:
            operation, *given = more[last]
            with graph.graph.inserting_after(node):
                message = graph.graph.call_function(operation, (node, *given))
            message.meta = dict(node.meta)
            node.replace_all_uses_with(message, delete_user_cb=lambda user, own=message: user is not own)
    return graph


def test_messages_of_any_step() -> None:
    with torch.device("meta"):
        model = Tiny()
    whole = merge(compose(trace(model), trace_head(model)))
    graph = gather_after_attention(with_messages(whole, Along("tp", 2)))

    def ones(tokens: int, rows: int) -> tuple[Batch, Tensor]:
        return meta_batch(Workload((1,) * tokens, (1,) * tokens)), meta_indices(rows)

    workload, rows = Workload((3, 1, 6), (3, 9, 8)), 3
    step = step_costs(graph, ones).step(workload, rows)
    nodes = node_costs(graph, (meta_batch(workload), meta_indices(rows)), workload)
    assert step == total(nodes).in_step
    assert step.messages == 2 * LAYERS + 1
    # Of two ranks each sends half of what it has, and half of the sum; of the logits what it has. The last layer's two
    # sums are behind the last attention.
    reduced = (2 * LAYERS - 2) * workload.tokens * HIDDEN + 2 * rows * HIDDEN
    assert step.sent == BYTES * (reduced + rows * VOCABULARY)
    link = link_of(device("h200"))
    shown = rows_by(nodes, lambda node: (node.operation, "", ""), device("h200"), "float32", "communication", link)
    sums = next(row for row in shown if row.operation == "all_reduce")
    assert (sums.count, sums.bound, sums.cost.sent) == (2 * LAYERS, "communication", BYTES * reduced)
    assert sums.seconds == pytest.approx(2 * LAYERS * 1.96e-6 + BYTES * reduced / 359e9)
    drawn = Console(width=120)
    with drawn.capture() as text:
        drawn.print(table("", shown, whole=1.0))
    assert "sent" in text.get()
    assert f"{quantity(sums.cost.sent)}B" in text.get()


def test_products_know_their_weight_merged_ones_together() -> None:
    h200 = device("h200")
    nodes = meta_model(find_config("0.6B"), h200).step(Workload((1, 1), (9, 9))).model
    weights = {node.operation: node.weight for node in reversed(nodes)}  # the first of each
    assert weights["scaled_linear"] == ((16 + 2 * 8) * 128, 1024)
    assert weights["scaled_linear_silu_mul"] == (2 * 3072, 1024)
    assert weights["decode_attention"] is None
    assert weights["embedding"] is None


def test_an_uncosted_function_is_named() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return operator.mul(x, 2)

    with pytest.raises(NotImplementedError, match="the cost of 'mul'"):
        node_costs(trace(Doubles()), torch.empty(3, device="meta"), WORKLOAD)


def test_rows_add_up_and_name_merged_parts() -> None:
    nodes = costs()
    h200 = device("h200")
    rows = rows_by(nodes, lambda node: (node.operation, node.module.rpartition(".")[2], ""), h200, "float32", "memory")
    assert sum(row.count for row in rows) == len(nodes)
    assert sum(row.cost.flops for row in rows) == total(nodes).flops
    merged = next(row for row in rows if row.part == "gate_proj&up_proj")
    assert sum(row.step_seconds for row in rows) == pytest.approx(floor(total(nodes).in_step, h200, "float32").memory)
    assert (merged.count, merged.parameters, merged.bound) == (LAYERS, 2 * INNER * HIDDEN * LAYERS, "memory")


def test_numbers_read_well() -> None:
    assert quantity(0) == "0 "
    assert quantity(405_853_388_800) == "406 G"
    assert quantity(999_600) == "1.00 M"
    assert quantity(16_384) == "16.4 k"
    assert duration(0.194) == "194 ms"
    assert duration(62.7e-6) == "62.7 us"
    assert duration(0) == "0"
