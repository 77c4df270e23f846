"""Rows in parts: the same results, messages begun before the products that hide them, and the times that decide it."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_reduce
from strata.comm.under_way import finish_all_reduce, start_all_reduce
from strata.cost.nodes import node_costs, total
from strata.engine.program.program import StepProgram
from strata.graph.bind import bind
from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.fuse_products import fuse_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.product_times import measured_seconds, products_of
from strata.graph.ranks.fuse_messages import fuse_gemm_all_reduce, fuse_messages
from strata.graph.ranks.overlap import overlap
from strata.graph.ranks.overlap_rule import OverlappedProduct, Stretch, last_stretch, overlapping_tokens, seconds
from strata.graph.ranks.row_split import AT_HALF, PARTS, RowSplit, max_rows, row_half
from strata.graph.trace import operation_of, trace, trace_head
from strata.graph.walk import meta_indices, operation_counts
from strata.hardware.links import Link, link_of
from strata.hardware.roofline import Cost, Workload
from strata.hardware.specs import DEVICES
from strata.kernels.linear.linear import linear
from strata.kernels.op import Operation
from strata.kernels.tuned import Key, TunedChoice
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.parallel.serving_shard import RankShard
from strata.plan.meta_model import find_config, meta_model

from .lockstep import run_in_lockstep
from .test_cost import meta_batch, with_messages
from .tiny import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, Tiny, packed

ALONE = Axis("tp", 1, 0, (0,), None)


def prompts_graph(ranks: int, *, fused: bool = True) -> fx.GraphModule:
    """Of steps with prompts, before messages are fused."""
    torch.manual_seed(0)
    model = Tiny()
    whole = with_messages(merge(compose(trace(model), trace_head(model))), Along("tp", ranks))
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
OF_70B = RowSplit(132, ((28672, 8192), (8192, 14336), (5120, 8192), (8192, 4096)))


@pytest.mark.parametrize("rows", [0, 1, 2, 255, 256, 257, 300, 1000, 4096, 8192])
@pytest.mark.parametrize("division", [AT_HALF, OF_70B])
def test_parts_are_all_rows_in_order(rows: int, division: RowSplit) -> None:
    x = torch.arange(rows)
    found = [row_half(x, index, division) for index in range(PARTS)]
    assert torch.equal(torch.cat(found), x)
    if rows >= 512:
        assert len(found[0]) % 128 == 0
        assert abs(len(found[0]) - len(found[1])) < (256 if division is AT_HALF else 1280)
    assert max(map(len, found)) <= max_rows(rows)
    assert all(len(one) > 0 for one in found) or rows < PARTS


def test_rows_are_divided_where_products_fill_their_last_round() -> None:
    """gate and up alone: 112 tiles of columns by 33 tiles of rows are 28 rounds of 132 exactly, and by 31 are 27."""
    gate_up = RowSplit(132, ((28672, 8192),))
    assert [gate_up.rounds(rows * 128, 28672) for rows in (32, 33, 31, 64)] == [28, 28, 27, 55]
    assert gate_up.boundary(8192) == 33 * 128
    # 56 tiles of columns: 32 tiles of rows take 14 rounds, 64 take 28, so the half is as good as any.
    assert RowSplit(132, ((14336, 4096),)).boundary(8192) == 4096


H200 = DEVICES["h200"]
# A tile of 128 rows and 256 columns for each of the 132 processors takes so long.
ROUND = 132 * 2 * 128 * 256 * 4096 / (0.87 * 800e12)
# One round for a part of 128 * 33 rows: 33 * 4 tiles.
PRODUCT, ROWS = OverlappedProduct(4 * 256, 4096, torch.bfloat16), 128 * 33
STRETCH = Stretch(((PRODUCT,), (PRODUCT, PRODUCT), (PRODUCT,)), (2048, 2048), 2)
# And half a round for its message.
LINK = Link(start=0.0, latency=0.0, bandwidth=2 * ROWS * 2048 / ROUND, source="", date="")


def test_one_after_the_other() -> None:
    assert seconds(STRETCH, ROWS, 1, H200, LINK) == pytest.approx((1 + 0.5 + 2 + 0.5 + 1) * ROUND)


def test_messages_beside_products() -> None:
    joined = 2 * 2 * ROWS * 2048 / 4.28e12  # read and written
    arrivals = 4 * (15e-6 + ROWS * 2048 / 4.28e12)  # two of each part, which norms read
    assert seconds(STRETCH, 2 * ROWS, 2, H200, LINK) == pytest.approx(8 * ROUND + arrivals + joined)
    # Messages of two rounds: of the first half the first is seen for one round, and so is the last of the second half,
    # less what arrives meanwhile.
    slow = replace(LINK, bandwidth=LINK.bandwidth / 4)
    assert seconds(STRETCH, 2 * ROWS, 2, H200, slow) == pytest.approx(10 * ROUND + arrivals * 3 / 4 + joined)


def test_a_graph_tells_its_products_and_messages() -> None:
    model = Tiny()
    whole = with_messages(merge(compose(trace(model), trace_head(model))), Along("tp", 4))
    graph = gather_after_attention(fuse_gated_products(fuse(whole)))
    o, qkv = (HIDDEN, HEADS * HEAD_DIM), ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    products = [[o], [(2 * INNER, HIDDEN), (HIDDEN, INNER)], [qkv]]
    steps = tuple(tuple(OverlappedProduct(*sizes, torch.float32) for sizes in step) for step in products)
    assert last_stretch(graph) == Stretch(steps, (4 * HIDDEN, 4 * HIDDEN), 4)
    # Its products are far too small for anything to be hidden by them.
    assert overlapping_tokens(graph, H200) is None
    assert overlapping_tokens(graph, None) is None
    assert last_stretch(gather_after_attention(fuse(merge(compose(trace(model), trace_head(model)))))) is None


def stretch(hidden: int, inner: int, heads: int) -> Stretch:
    """Of a rank of two, whose layers have 8 KV heads of 128 in all."""

    def product(out: int, width: int) -> OverlappedProduct:
        return OverlappedProduct(out, width, torch.bfloat16)

    o, qkv = product(hidden, heads * 64), product(heads * 64 + 1024, hidden)
    return Stretch(((o,), (product(inner, hidden), product(hidden, inner // 2)), (qkv,)), (2 * hidden, 2 * hidden), 2)


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        (stretch(4096, 14336, 32), {2048: -117, 4096: 72, 8192: 331}),
        (stretch(8192, 28672, 64), {2048: 90, 4096: 361, 8192: 593}),
    ],
    ids=["8B", "70B"],
)
def test_the_time_won_is_predicted_as_two_h200_measured_it(shape: Stretch, measured: dict[int, float]) -> None:
    """Microseconds a layer, of steps of up to 86 ms whose times differ by a percent from one to the next."""
    link = link_of(H200)
    for tokens, won in measured.items():
        whole, parts = (1e6 * seconds(shape, tokens, count, H200, link) for count in (1, 2))
        assert whole - parts == pytest.approx(won, abs=125)


def graphs_of(name: str, ranks: int) -> StepProgram:
    """Of the first of so many H200, with two layers of a model."""
    whole = find_config(name)
    experts = None if whole.experts is None else replace(whole.experts, layers=whole.experts.layers[:2])
    config = replace(whole, num_layers=2, windows=whole.windows[:2], experts=experts)
    return meta_model(config, H200, shard=RankShard.of(config, ranks, 0)).program


@pytest.mark.parametrize(("name", "least"), [("8B", 4096), ("70B", 2048), ("30B-A3B", 0)])
def test_engines_over_two_gpus_divide_the_rows_of_steps_that_gain(name: str, least: int) -> None:
    graphs = graphs_of(name, 2)
    assert graphs.min_rows("overlapped_logits") == least
    assert (graphs.variant("overlapped_logits") is not None) is (least > 0)


def test_without_copy_engines_no_rows_are_divided_by_default() -> None:
    assert graphs_of("70B", 4).variant("overlapped_logits") is None


SMALL_LAYERS, SMALL_HIDDEN, SMALL_INNER, SMALL_VOCABULARY, QKV, SMALL_HEADS = 3, 64, 96, 200, 128, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SMALL_HIDDEN,
    "intermediate_size": SMALL_INNER,
    "num_hidden_layers": SMALL_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": SMALL_VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def small_graph() -> fx.GraphModule:
    with torch.device("meta"):
        model: nn.Module = build(config_from_dict(CONFIG)).to(torch.bfloat16)
    return fuse(merge(compose(trace(model), trace_head(model))))


def key(operation: str, out: int, width: int, rows: int = 1) -> Key:
    return Key(operation, "bfloat16", out, width, rows)


APART = {
    key("linear", QKV, SMALL_HIDDEN): 1,
    key("linear", SMALL_HIDDEN, SMALL_HEADS): 1,
    key("linear", 2 * SMALL_INNER, SMALL_HIDDEN): 1,
    key("linear", SMALL_HIDDEN, SMALL_INNER): 1,
}
FUSED = {
    key("scaled_linear", QKV, SMALL_HIDDEN): 1,
    key("linear_add", SMALL_HIDDEN, SMALL_HEADS): 1,
    key("scaled_linear_silu_mul", 2 * SMALL_INNER, SMALL_HIDDEN): 1,
    key("linear_add", SMALL_HIDDEN, SMALL_INNER): 1,
}


@pytest.mark.parametrize("bound", [False, True])
def test_products_of_a_layer(bound: bool) -> None:
    for made, counts, between in ((small_graph(), APART, 3), (fuse_products(small_graph()), FUSED, 0)):
        products = products_of(bind(made, "cpu") if bound else made)
        assert dict(products.counts) == counts
        assert products.between == between


def test_seconds_are_those_of_the_next_larger_number_of_rows() -> None:
    products = products_of(small_graph())
    table = {
        key(product.operation, product.out, product.width, rows): TunedChoice("cublas", {}, seconds, seconds)
        for product in APART
        for rows, seconds in ((64, 1.0), (128, 2.0))
    }
    count = 4
    assert measured_seconds(products, 60, table) == pytest.approx(count, abs=1e-3)
    assert measured_seconds(products, 65, table) == pytest.approx(2 * count, abs=1e-3)
    assert measured_seconds(products, 65, table) != 2 * count, "norms take time too"
    assert measured_seconds(products, 129, table) is None
    del table[key("linear", QKV, SMALL_HIDDEN, 64)]
    assert measured_seconds(products, 64, table) is None


def test_products_that_are_sent_are_those_of_their_tiles_alone() -> None:
    made = with_messages(small_graph(), Along("tp", 2))
    wanted = products_of(fuse_messages(made))
    assert products_of(fuse_gemm_all_reduce(made)) == wanted
    assert dict(wanted.counts) == APART
