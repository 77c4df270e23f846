"""What a table tells of the products of a graph, against the products counted from a model's sizes."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from strata.comm.operations import Along
from strata.graph.bind import bind
from strata.graph.capture import capture, capture_head
from strata.graph.compose import compose
from strata.graph.fuse import fuse
from strata.graph.fuse_products import fuse_products
from strata.graph.merge import merge
from strata.graph.product_times import measured_seconds, products_of
from strata.graph.ranks.fuse_messages import fuse_messages
from strata.graph.ranks.fuse_sent_products import fuse_sent_products
from strata.kernels.tuned import Choice, Key
from strata.models.config import config_from_dict
from strata.models.families import build

from .test_cost import with_messages

LAYERS, HIDDEN, INNER, VOCABULARY, QKV, HEADS = 3, 64, 96, 200, 128, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def graph() -> fx.GraphModule:
    with torch.device("meta"):
        model: nn.Module = build(config_from_dict(CONFIG)).to(torch.bfloat16)
    return fuse(merge(compose(capture(model), capture_head(model))))


def key(operation: str, out: int, width: int, rows: int = 1) -> Key:
    return Key(operation, "bfloat16", out, width, rows)


APART = {
    key("linear", QKV, HIDDEN): 1,
    key("linear", HIDDEN, HEADS): 1,
    key("linear", 2 * INNER, HIDDEN): 1,
    key("linear", HIDDEN, INNER): 1,
}
FUSED = {
    key("scaled_linear", QKV, HIDDEN): 1,
    key("linear_add", HIDDEN, HEADS): 1,
    key("scaled_linear_silu_mul", 2 * INNER, HIDDEN): 1,
    key("linear_add", HIDDEN, INNER): 1,
}


@pytest.mark.parametrize("bound", [False, True])
def test_products_of_a_layer(bound: bool) -> None:
    for made, counts, between in ((graph(), APART, 3), (fuse_products(graph()), FUSED, 0)):
        products = products_of(bind(made, "cpu") if bound else made)
        assert dict(products.counts) == counts
        assert products.between == between


def test_seconds_are_those_of_the_next_larger_number_of_rows() -> None:
    products = products_of(graph())
    table = {
        key(product.operation, product.out, product.width, rows): Choice("cublas", {}, seconds, seconds)
        for product in APART
        for rows, seconds in ((64, 1.0), (128, 2.0))
    }
    count = 4
    assert measured_seconds(products, 60, table) == pytest.approx(count, abs=1e-3)
    assert measured_seconds(products, 65, table) == pytest.approx(2 * count, abs=1e-3)
    assert measured_seconds(products, 65, table) != 2 * count, "norms take time too"
    assert measured_seconds(products, 129, table) is None
    del table[key("linear", QKV, HIDDEN, 64)]
    assert measured_seconds(products, 64, table) is None


def test_products_that_are_sent_are_those_of_their_tiles_alone() -> None:
    made = with_messages(graph(), Along("tp", 2))
    wanted = products_of(fuse_messages(made))
    assert products_of(fuse_sent_products(made)) == wanted
    assert dict(wanted.counts) == APART
