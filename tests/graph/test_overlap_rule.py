"""The cost model of divided rows: times counted by hand, and from how many tokens on it says that they pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.comm.operations import Along
from strata.graph.capture import capture, capture_head
from strata.graph.compose import compose
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.overlap_rule import Product, Stretch, last_stretch, overlapping_tokens, seconds
from strata.hardware.links import Link
from strata.hardware.specs import DEVICES

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
    assert seconds(STRETCH, 2 * ROWS, 2, H200, LINK) == pytest.approx(8 * ROUND + joined)
    # Messages of two rounds: of the first half the first is seen for one round, and so is the last of the second half.
    slow = replace(LINK, bandwidth=LINK.bandwidth / 4)
    assert seconds(STRETCH, 2 * ROWS, 2, H200, slow) == pytest.approx(10 * ROUND + joined)


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


@pytest.mark.parametrize(("hidden", "inner", "heads", "least"), [(4096, 14336, 32, 2048), (8192, 28672, 64, 1024)])
def test_large_models_gain_from_large_steps(hidden: int, inner: int, heads: int, least: int) -> None:
    """The 8B and the 70B shape on two H200s: from `least` tokens on, and 8,192 hide most of their messages."""
    dtype = torch.bfloat16

    def product(out: int, width: int) -> Product:
        return Product(out, width, dtype)

    o, qkv = product(hidden, heads * 64), product(heads * 64 + 1024, hidden)
    mlp = product(inner, hidden), product(hidden, inner // 2)
    stretch = Stretch(((o,), mlp, (qkv,)), (2 * hidden, 2 * hidden), 2)
    link = replace(LINK, start=25.1e-6, latency=2.33e-6, bandwidth=339e9)
    gains = {n: seconds(stretch, n, 1, H200, link) / seconds(stretch, n, 2, H200, link) for n in (least // 2, least)}
    assert gains[least // 2] < 1 < gains[least]
    whole, parts = (seconds(stretch, 8192, count, H200, link) for count in (1, 2))
    messages = 2 * link.seconds(2, 2 * hidden * 8192)
    assert whole - parts > 0.8 * messages
