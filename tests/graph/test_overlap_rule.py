"""The cost model of divided rows: times counted by hand, and from how many tokens on it says that they pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.comm.operations import Along
from strata.engine.program.program import StepProgram
from strata.graph.capture import capture, capture_head
from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.ranks.overlap_rule import Product, Stretch, last_stretch, overlapping_tokens, seconds
from strata.hardware.links import Link, link_of
from strata.hardware.specs import DEVICES
from strata.parallel.serving_shard import RankShard
from strata.plan.meta_model import find_config, meta_model

from .test_cost import with_messages
from .tiny import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, Tiny

H200 = DEVICES["h200"]
# A tile of 128 rows and 256 columns for each of the 132 processors takes so long.
ROUND = 132 * 2 * 128 * 256 * 4096 / (0.87 * 800e12)
# One round for a part of 128 * 33 rows: 33 * 4 tiles.
PRODUCT, ROWS = Product(4 * 256, 4096, torch.bfloat16), 128 * 33
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
    whole = with_messages(merge(compose(capture(model), capture_head(model))), Along("tp", 4))
    graph = gather_after_attention(fuse_gated_products(fuse(whole)))
    o, qkv = (HIDDEN, HEADS * HEAD_DIM), ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    products = [[o], [(2 * INNER, HIDDEN), (HIDDEN, INNER)], [qkv]]
    steps = tuple(tuple(Product(*sizes, torch.float32) for sizes in step) for step in products)
    assert last_stretch(graph) == Stretch(steps, (4 * HIDDEN, 4 * HIDDEN), 4)
    # Its products are far too small for anything to be hidden by them.
    assert overlapping_tokens(graph, H200) is None
    assert overlapping_tokens(graph, None) is None
    assert last_stretch(gather_after_attention(fuse(merge(compose(capture(model), capture_head(model)))))) is None


def stretch(hidden: int, inner: int, heads: int) -> Stretch:
    """Of a rank of two, whose layers have 8 KV heads of 128 in all."""

    def product(out: int, width: int) -> Product:
        return Product(out, width, torch.bfloat16)

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
